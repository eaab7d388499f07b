"""Check the native transports on GPUs against the reference executor, bit for bit.

Run one process per rank, each with its GPU (several ranks may share one where NCCL allows it):

    torchrun --nproc-per-node 4 tools/check_native.py
    python tools/check_native.py --ranks 4 --comm copy --cases exact graph death

``exact``: forward and backward of random plans (schedules, uneven chunks, grouped heads, bf16 and
fp16) over each transport against the same plan over host memory, on the default and on other
streams, buffers new and used. ``graph``: a captured forward, replayed with other inputs. Both with
the reference executor's walk and torch's kernels, and with the native executor's tape and our own.
``attention``: dist_flash_attention over each transport against torch.distributed's. ``death``: one
rank kills itself; the others must raise within the deadline. torchrun would end them at once, so
this needs --ranks, which starts the ranks itself. ``stuck``: one rank does nothing for longer than
the deadline, and must raise when it goes on. Exits with status 1 and says where a check fails.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from own_gpu import own_gpu  # noqa: E402

from megatron_distflash.plan import Mask, build, build_backward  # noqa: E402
from megatron_distflash.runtime import comm as transports  # noqa: E402
from megatron_distflash.runtime import cuda_kernels, reference, tape  # noqa: E402
from megatron_distflash.runtime.attention import dist_flash_attention  # noqa: E402
from megatron_distflash.runtime.native import NativeExecutor, Options  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")
DEATH_TIMEOUT_S = 3.0
GRACE_S = 15.0
LOSSES = ("death", "stuck")
# Executors, each with the kernels that it is checked with.
EXECUTORS = {"walk": (reference, "flash"), "tape": (tape, "cuda")}


class HostTransport:
    """The reference: everything through host memory and gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._transport = reference.TorchTransport(group)
        self._receives: list[tuple[list[Tensor], list[Tensor]]] = []

    def targets(self, transfer, wires, device) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype, device=device) for wire in wires]

    def post(self, step_idx, sends, receives) -> None:
        sends = [(transfer, [x.cpu() for x in tensors]) for transfer, tensors in sends]
        landing = [(transfer, [x.cpu() for x in tensors]) for transfer, tensors in receives]
        self._receives = [
            (tensors, on_host) for (_, tensors), (_, on_host) in zip(receives, landing, strict=True)
        ]
        self._transport.post(step_idx, sends, landing)

    def wait(self) -> None:
        self._transport.wait()
        for tensors, on_host in self._receives:
            for target, source in zip(tensors, on_host, strict=True):
                target.copy_(source)


class Case:
    """A random problem that all ranks draw alike; ``rank``'s tensors."""

    def __init__(self, seed: int, rank: int, num_ranks: int, device: torch.device) -> None:
        rng = random.Random(seed)
        self.rank, self.device = rank, device
        self.schedule = rng.choice(["balanced", "balanced", "paper", "ring", "zigzag"])
        self.lengths = tuple(rng.randint(1, 40) * 16 for _ in range(num_ranks))
        self.kv_heads = rng.choice([1, 2, 4])
        self.heads = self.kv_heads * rng.choice([1, 2, 4])
        self.dtype = rng.choice([torch.bfloat16, torch.float16])
        self.head_dim, self.batch = rng.choice([64, 128]), rng.choice([1, 2])
        options = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "mask": Mask.causal()}
        options["prefetch"] = rng.choice([1, 2])
        self.plans = tuple(
            make(self.schedule, self.lengths, **options) for make in (build, build_backward)
        )
        self.generator = torch.Generator(device).manual_seed(seed * num_ranks + rank)

    def __str__(self) -> str:
        return (
            f"{self.schedule} {self.lengths} heads {self.heads}/{self.kv_heads} "
            f"d {self.head_dim} b {self.batch} {self.dtype}"
        )

    def inputs(self) -> list[Tensor]:
        """q, k, v, dout."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.randn(
                (self.lengths[self.rank], self.batch, h, self.head_dim),
                generator=self.generator,
                device=self.device,
            ).to(self.dtype)
            for h in heads
        ]

    def run(self, inputs: list[Tensor], transports, how: str, *, walked=False) -> list[Tensor]:
        """out, lse, dq, dk, dv. ``how``: of ``EXECUTORS``; walked: its kernels by the reference."""
        q, k, v, dout = inputs
        executor, kernel = EXECUTORS[how]
        executor = reference if walked else executor
        options = {"scale": self.head_dim**-0.5, "kernel": kernel}
        forward, backward = self.plans
        out, lse = executor.forward(forward, self.rank, q, k, v, transport=transports[0], **options)
        grads = executor.backward(
            backward, self.rank, dout, q, k, v, out, lse, transport=transports[1], **options
        )
        return [out, lse, *grads]


def check_exact(executor: NativeExecutor, case: Case, on_host: HostTransport, how: str) -> None:
    """Three calls: default stream, another stream, default stream again in used buffers."""
    other = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), other, torch.cuda.default_stream()):
        inputs = case.inputs()
        wanted = case.run(inputs, (on_host, on_host), how, walked=True)
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            native = [executor.transport(plan, inputs[1]) for plan in case.plans]
            got = case.run(inputs, native, how)
        torch.cuda.default_stream().wait_stream(stream)
        for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
            if not torch.equal(ours, theirs):
                worst = (ours.double() - theirs.double()).abs().max().item()
                raise AssertionError(f"rank {case.rank}: {name} differs by {worst}: {case}")
        if how == "tape" and case.schedule == "balanced":
            assert all(len(x.tapes) == 1 and None not in x.tapes.values() for x in native), case


def check_graph(executor: NativeExecutor, case: Case, on_host: HostTransport, how: str) -> None:
    """A captured forward, replayed three times with new inputs."""
    q, k, v, _ = case.inputs()
    plan = case.plans[0]
    transport = executor.transport(plan, k)
    module, kernel = EXECUTORS[how]
    options = {"scale": case.head_dim**-0.5, "kernel": kernel}

    def forward(over) -> tuple[Tensor, Tensor]:
        return module.forward(plan, case.rank, q, k, v, transport=over, **options)

    forward(transport)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out, lse = forward(transport)
    for _ in range(3):
        for mine, fresh in zip((q, k, v), case.inputs(), strict=False):
            mine.copy_(fresh)
        wanted, _ = forward(on_host)
        graph.replay()
        if not torch.equal(out, wanted):
            raise AssertionError(f"rank {case.rank}: a replayed graph differs: {case}")
    torch.cuda.synchronize()
    dist.barrier()
    forward(transport)  # and not captured again
    torch.cuda.synchronize()


def check_attention(comm: str, case: Case) -> None:
    """The public function, twice each way, against torch.distributed's operations."""
    group = dist.group.WORLD

    def attend(inputs: list[Tensor], comm: str) -> list[Tensor]:
        q, k, v, dout = (x.clone().requires_grad_() for x in inputs)
        out, lse = dist_flash_attention(
            q, k, v, group=group, schedule=case.schedule, chunk_lengths=case.lengths,
            kernel="flash", return_lse=True, comm=comm, timeout_s=60.0,
        )  # fmt: skip
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    for _ in range(2):
        inputs = case.inputs()
        wanted = attend(inputs, "torch")
        for name, ours, theirs in zip(NAMES, attend(inputs, comm), wanted, strict=True):
            if not torch.equal(ours, theirs):
                worst = (ours.double() - theirs.double()).abs().max().item()
                raise AssertionError(f"rank {case.rank}: {name} differs by {worst}: {case}")


def check_loss(executor: NativeExecutor, case: Case, how: str, *, dies: bool) -> None:
    """The last rank dies between two calls, or is stuck for long and then goes on; returns after
    the others raised, and the one that was stuck too, or fails."""
    inputs = case.inputs()
    native = [executor.transport(plan, inputs[1]) for plan in case.plans]
    case.run(inputs, native, how)
    torch.cuda.synchronize()
    dist.barrier()
    if case.rank == len(case.lengths) - 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(DEATH_TIMEOUT_S + 2)
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < DEATH_TIMEOUT_S + GRACE_S:
            out = case.run(inputs, native, how)[0]
            torch.cuda.synchronize()
    except RuntimeError as error:
        took_s = time.monotonic() - begun
        print(f"ok: rank {case.rank} raised after {took_s:.1f} s: {error}", flush=True)
        if took_s > DEATH_TIMEOUT_S + GRACE_S:
            raise AssertionError(f"rank {case.rank}: the error came after {took_s} s") from error
        return
    raise AssertionError(f"rank {case.rank}: no error; out is {out.float().norm().item()}")


def free_port() -> int:
    """Not one of those that the system gives to whoever asks for any, in the meantime perhaps."""
    while True:
        port = random.SystemRandom().randrange(12000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_ranks(num_ranks: int, cases: list[str]) -> int:
    """This command as ``num_ranks`` processes; the exit status. In the death check the last one is
    meant to be killed."""
    port = free_port()
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    processes = []
    for rank in range(num_ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **master, **place}
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    codes = [process.wait() for process in processes]
    if "death" in cases and codes.pop() != -signal.SIGKILL:
        return 1
    return 1 if any(codes) else 0


def main() -> None:
    args = parse_args()
    if args.ranks and "RANK" not in os.environ:
        sys.exit(start_ranks(args.ranks, args.cases))
    device = own_gpu()
    rank = int(os.environ["RANK"])
    kernels, reason = cuda_kernels.load()
    if kernels is None:
        print(f"rank {rank}: without tapes, as our kernels cannot run: {reason}", flush=True)
    args.executor = args.executor or (["walk", "tape"] if kernels is not None else ["walk"])
    torch.use_deterministic_algorithms(True)
    # NCCL for what torch.distributed moves in the attention check; it starts at its first use.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
    seed = [args.seed]
    dist.broadcast_object_list(seed)
    args.seed = seed[0]
    for comm in args.comm:
        check_comm(args, comm, device)
    dist.destroy_process_group()


def check_comm(args: argparse.Namespace, comm: str, device: torch.device) -> None:
    """All cases of one transport."""
    group = dist.group.WORLD
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(f"{comm}, P = {num_ranks}: {text}", flush=True)

    losses = [name for name in LOSSES if name in args.cases]
    begun = time.monotonic()
    executor = NativeExecutor(
        group,
        comm,
        device,
        timeout_s=DEATH_TIMEOUT_S if losses else 60.0,
        options=Options(is_blocking=not args.in_progress),
    )
    made_s = time.monotonic() - begun
    executor.try_out()
    seeds = range(args.seed, args.seed + args.num_cases)
    on_host = HostTransport(group)
    for name, check in (("exact", check_exact), ("graph", check_graph)):
        for how in args.executor if name in args.cases else ():
            for seed in seeds:
                check(executor, Case(seed, rank, num_ranks, device), on_host, how)
            say(f"ok: {name}, {how}, seeds {seeds}")
    if "attention" in args.cases:
        for seed in seeds:
            check_attention(comm, Case(seed, rank, num_ranks, device))
        transports.close(group)
        say(f"ok: attention, seeds {seeds}")
    for name in losses:
        case = Case(args.seed, rank, num_ranks, device)
        check_loss(executor, case, args.executor[-1], dies=name == "death")
        executor.close(alone=True)
        os._exit(0)  # the process group may have lost a rank, and would wait for it
    reserved = executor.memory_reserved() / 2**20
    say(f"made in {made_s:.1f} s, {reserved:.0f} MiB reserved")
    executor.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--comm", nargs="+", default=["nccl", "copy"], choices=["nccl", "copy"])
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["exact", "graph", "attention"],
        choices=["exact", "graph", "attention", *LOSSES],
    )
    parser.add_argument("--ranks", type=int, help="start so many ranks, without torchrun")
    parser.add_argument("--executor", nargs="+", choices=list(EXECUTORS), help="default: all")
    parser.add_argument("--num-cases", type=int, default=6, help="random plans per check")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**20))
    parser.add_argument("--in-progress", action="store_true", help="NCCL calls do not block")
    args = parser.parse_args()
    if "death" in args.cases and not args.ranks:
        parser.error("--cases death needs --ranks: torchrun would end all ranks with the first one")
    if len([name for name in LOSSES if name in args.cases]) * len(args.comm) > 1:
        parser.error("ranks do not outlive a loss: one of death and stuck, and one --comm")
    return args


if __name__ == "__main__":
    main()
