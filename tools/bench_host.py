#!/usr/bin/env python
"""The host's time for one call of the executor: what Python does while the GPU computes.

    python tools/bench_host.py
    python tools/bench_host.py --ranks 2 4 8 --schedule balanced zigzag
    python tools/bench_host.py --kernel cuda --profile
    torchrun --nproc-per-node 8 tools/bench_host.py --comm nccl copy

The first three run on any machine, on small CPU tensors. Nothing is computed and nothing is moved,
so that only our own code counts: the walk over the plan, the views and new tensors, and with

    none    nothing else: kernels return the tensors that they were given
    cuda    all that our kernels' calls need up to the C functions, and calls of a C function that
            does nothing
    tape    the native executor's one call into C++, which calls that C function too

A GPU is idle whenever its kernels take less time than this. Every line is one rank: microseconds
per call (the median, and the quickest), and per step. They are this thread's time on a CPU, so that
others on the same machine disturb little.

With --comm every process is a rank with a GPU (several may share one where NCCL allows it), kernels
are launched and transfers posted, on tensors so small that the GPU is done before the host. Lines
are the slowest rank's time from a call to its return, for the executors ``walk`` and ``tape``, for
what the tape launches and what it moves, each without the other, and for the public function,
``op``, which checks its input and looks its plan up.
"""

import argparse
import contextlib
import cProfile
import ctypes
import ctypes.util
import dataclasses
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_unmoved import Unmoved  # noqa: E402
from own_gpu import own_gpu  # noqa: E402

from megatron_distflash.plan import SCHEDULES, Mask, Plan, build, build_backward  # noqa: E402
from megatron_distflash.runtime import (  # noqa: E402
    blocks,
    hopper_kernel,
    native,
    program,
    reference,
    state,
    tape,
)
from megatron_distflash.runtime.attention import dist_flash_attention  # noqa: E402
from megatron_distflash.runtime.cuda_kernels import CudaKernels  # noqa: E402
from megatron_distflash.runtime.flat import FlatPlan, flatten  # noqa: E402
from megatron_distflash.runtime.flat import Shape as WireShape  # noqa: E402
from megatron_distflash.runtime.native import NativeExecutor, NativeTransport  # noqa: E402
from megatron_distflash.runtime.shadow import Notes  # noqa: E402

KERNELS = ("none", "cuda", "tape")
CPU = torch.device("cpu")


class Still(Unmoved):
    """Finds a transfer's tensors by its identity: hashing it would count as our time."""

    def __init__(self) -> None:
        super().__init__(lse=1.0)
        self._of: dict[int, list[Tensor]] = {}

    def targets(self, transfer, wires, device) -> list[Tensor]:
        found = self._of.get(id(transfer))
        if found is None:
            found = self._of[id(transfer)] = super().targets(transfer, wires, device)
        return found


def unmoved_natively(plan: Plan, rank: int, k: Tensor) -> NativeTransport:
    """A native transport of a plan that moves nothing, for calls of one rank alone."""

    def without_transfers(*args, **options) -> FlatPlan:
        return FlatPlan([], flatten(*args, **options).workspace_bytes)

    communicator = native.module().Communicator.host(
        native.module().HostHub(plan.num_ranks), rank, 60.0
    )
    with mock.patch.object(native, "flatten", without_transfers):
        return NativeTransport(communicator, plan, WireShape.of(k), k.device)


class Idle:
    """A block kernel, and row kernels, that do nothing."""

    name = "cpu"

    def __init__(self) -> None:
        self._made: dict[tuple, Tensor] = {}

    def refusal(self, q, shape, direction) -> None:
        return None

    def forward(self, tasks, scale, gives_way) -> list[tuple[Tensor, Tensor]]:
        return [self._state(task) for task in tasks]

    def backward(self, tasks, scale, gives_way) -> list[tuple[Tensor, ...]]:
        return [tuple(map(self._sum, "qkv", task.into, (task.q, task.k, task.v))) for task in tasks]

    def merge(self, *args, **options) -> None:
        pass

    accumulate = cast = delta = merge

    def _state(self, task) -> tuple[Tensor, Tensor]:
        if task.into is None:
            return self._made_once("out", task.q), self._made_once("lse", task.q[..., 0])
        return task.into.acc if task.into.out is None else task.into.out, task.into.lse

    def _sum(self, name: str, total: Tensor | None, like: Tensor) -> Tensor:
        return self._made_once(name, like) if total is None else total

    def _made_once(self, name: str, like: Tensor) -> Tensor:
        """Zeros in float32: a kernel's own tensors count as its time."""
        key = name, like.shape
        if key not in self._made:
            self._made[key] = torch.zeros(like.shape, device=like.device)
        return self._made[key]


class OursOnCpu(hopper_kernel.Hopper):
    """Our own kernel, which does not mind that tensors are on the CPU."""

    def refusal(self, q, shape, direction) -> None:
        return None


class EmptyLibrary:
    """Has the functions of our library: a C function that ignores its arguments and returns 0."""

    def __init__(self) -> None:
        self._functions = ctypes.CDLL(ctypes.util.find_library("m"))

    def __getattr__(self, name: str):
        function = self._functions["fegetround"]
        setattr(self, name, function)
        return function


class KernelsOnCpu(CudaKernels):
    """Our library's calls, but for the device and its stream.

    Attributes:
        num_calls: how many there were.
    """

    num_calls = 0

    def _call(self, name, device, *arguments) -> None:
        function = getattr(self._library, f"distflash_{name}")
        message = function(*arguments, ctypes.c_void_p(0))
        assert message is None, "fegetround says that rounding was changed"
        self.num_calls += 1


def forget_kernels() -> None:
    """All that remembers which kernel was chosen for what."""
    blocks._chosen.cache_clear()
    program._program.cache_clear()


_open = Notes.open


def _open_without_transfers(notes: Notes, step_idx: int, sent: Sequence) -> None:
    _open(notes, step_idx, ())


@contextlib.contextmanager
def nothing_runs(kernel: str) -> Iterator[KernelsOnCpu]:
    """Meanwhile the block kernel "cpu" is one of ``KERNELS`` here; gives what the calls go to."""
    library, idle = KernelsOnCpu(EmptyLibrary()), Idle()
    block_kernel = idle if kernel == "none" else OursOnCpu()

    def row_kernels(*tensors: Tensor) -> Idle | KernelsOnCpu:
        if kernel == "none":
            return idle
        assert all(state._row_kernels_take(x) for x in tensors), "not as on a GPU"
        return library

    forget_kernels()
    try:
        with (
            mock.patch.dict(blocks._KERNELS, cpu=block_kernel),
            mock.patch.object(hopper_kernel, "_kernels", lambda: library),
            mock.patch.object(state, "_row_kernels", row_kernels),
            mock.patch.object(Notes, "open", _open_without_transfers),
        ):
            yield library
    finally:
        forget_kernels()


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one rank's tensors: [tokens, batch, heads or kv_heads, head_dim]."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int

    def random(self, num_heads: int) -> Tensor:
        return torch.randn(self.tokens, self.batch, num_heads, self.head_dim).bfloat16()


def plans(schedule: str, num_ranks: int, shape: Shape) -> tuple[Plan, Plan]:
    """(forward, backward)."""
    lengths = (shape.tokens,) * num_ranks
    options = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "mask": Mask.causal()}
    return build(schedule, lengths, **options), build_backward(schedule, lengths, **options)


Call = Callable[[], object]


def calls(both: tuple[Plan, Plan], rank: int, shape: Shape, kernel: str) -> tuple[Call, Call]:
    """One rank's (forward, backward), inside ``nothing_runs``."""
    if kernel != "tape":
        return _calls(reference, both, rank, shape, (Still(), Still()), "cpu", CPU)
    k = shape.random(shape.kv_heads)
    moves = [unmoved_natively(plan, rank, k) for plan in both]
    return _calls(tape, both, rank, shape, moves, "cpu", CPU)


def _calls(executor, both, rank, shape: Shape, moves, kernel: str, device) -> tuple[Call, Call]:
    q, dout, out = (shape.random(shape.heads).to(device) for _ in range(3))
    k, v = (shape.random(shape.kv_heads).to(device) for _ in range(2))
    lse = state.empty_rows(q).fill_(1.0)
    how = {"scale": shape.head_dim**-0.5, "kernel": kernel}
    return (
        lambda: executor.forward(both[0], rank, q, k, v, **how, transport=moves[0]),
        lambda: executor.backward(
            both[1], rank, dout, q, k, v, out, lse, **how, transport=moves[1]
        ),
    )


def microseconds(call: Callable[[], object], turns: int) -> list[float]:
    """Of each of ``turns`` calls, after a few that fill the caches."""
    for _ in range(5):
        call()
    times = []
    for _ in range(turns):
        start = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start) / 1e3)
    return times


def profile(call: Callable[[], object], turns: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(turns):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def report(args: argparse.Namespace, schedule: str, num_ranks: int, kernel: str) -> None:
    """Print the ranks' lines; with --profile also where the slowest rank's time goes."""
    shape = Shape(args.tokens, args.batch, args.heads, args.kv_heads, args.head_dim)
    both = plans(schedule, num_ranks, shape)
    ranks = sorted({0, num_ranks - 1}) if args.rank is None else args.rank
    with nothing_runs(kernel):
        for way, name in enumerate(("forward", "backward")):
            slowest = (0.0, None)
            for rank in ranks:
                call = calls(both, rank, shape, kernel)[way]
                times = microseconds(call, args.turns)
                line(schedule, num_ranks, rank, kernel, name, times, both[way].num_steps)
                slowest = max(slowest, (statistics.median(times), call), key=lambda x: x[0])
            if args.profile and slowest[1] is not None:
                profile(slowest[1], args.turns)


def line(schedule, num_ranks, rank, what: str, name: str, times: list[float], steps: int) -> None:
    median = statistics.median(times)
    print(
        f"{schedule:>9} {num_ranks:>5} {rank:>5} {what:>13} {name:>9} {median:>8.0f} "
        f"{min(times):>8.0f} {steps:>6} {median / steps:>8.1f}",
        flush=True,
    )


# ---- in earnest, on GPUs ------------------------------------------------------------------------


def report_in_earnest(args: argparse.Namespace) -> None:
    """The slowest rank's lines, by rank 0; every rank calls this."""
    device = own_gpu()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = Shape(args.tokens, args.batch, args.heads, args.kv_heads, args.head_dim)
    k = shape.random(args.kv_heads).to(device)
    for schedule in args.schedule:
        both = plans(schedule, num_ranks, shape)
        for comm in args.comm:
            executor = NativeExecutor(dist.group.WORLD, comm, device, timeout_s=60.0)
            moves = [executor.transport(plan, k) for plan in both]
            for way, name in enumerate(("forward", "backward")):
                for what, module in (("walk", reference), ("tape", tape)):
                    call = _calls(module, both, rank, shape, moves, "cuda", device)[way]
                    times = together(call, args.turns)
                    steps = both[way].num_steps
                    if rank == 0:
                        line(schedule, num_ranks, "all", f"{comm} {what}", name, times, steps)
                for what, moves_too in (("launches", False), ("moves", True)):
                    with only(moves[way], moves_too):
                        times = together(call, args.turns)
                    if rank == 0:
                        line(schedule, num_ranks, "all", f"{comm} {what}", name, times, steps)
            executor.close()
            q = shape.random(args.heads).to(device)
            how = {"schedule": schedule, "kernel": "cuda", "comm": comm}
            times = together(
                lambda: dist_flash_attention(q, k, k, group=dist.group.WORLD, **how),  # noqa: B023
                args.turns,
            )
            if rank == 0:
                line(schedule, num_ranks, "all", f"{comm} op", "forward", times, both[0].num_steps)
    dist.destroy_process_group()


@contextlib.contextmanager
def only(transport: NativeTransport, moves: bool) -> Iterator[None]:
    """Meanwhile the transport's one tape does nothing but its transfers, or all but those."""
    ((key, whole),) = transport.tapes.items()
    assert whole is not None, "our kernels cannot be called from C++"
    kept = [note for note in whole.notes if (note[0] in ("open", "close")) is moves]
    functions = hopper_kernel._kernels().addresses()
    part = native.module().Tape(transport.executor, functions, whole.num_buffers, kept)
    transport.tapes[key] = dataclasses.replace(whole, played=part)
    try:
        yield
    finally:
        transport.tapes[key] = whole


def together(call: Call, turns: int) -> list[float]:
    """The slowest rank's microseconds from each call to its return, begun together with the GPU
    idle; after a few that fill the caches."""
    times = []
    for _ in range(turns + 5):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    slowest = torch.tensor(times[5:])
    torch.cuda.synchronize()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--rank", type=int, nargs="+", help="default: first and last")
    parser.add_argument("--schedule", nargs="+", choices=sorted(SCHEDULES), default=["balanced"])
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--tokens", type=int, default=16, help="of each rank")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument(
        "--comm", nargs="+", choices=("nccl", "copy"), help="in earnest: this process is a rank"
    )
    parser.add_argument("--profile", action="store_true", help="of each direction's slowest rank")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.comm is None or os.environ.get("RANK") == "0":
        print(
            f"{'schedule':>9} {'ranks':>5} {'rank':>5} {'what':>13} {'direction':>9} "
            f"{'us/call':>8} {'quickest':>8} {'steps':>6} {'us/step':>8}"
        )
    if args.comm is not None:
        report_in_earnest(args)
        return
    for schedule in args.schedule:
        for num_ranks in args.ranks:
            for kernel in args.kernel:
                report(args, schedule, num_ranks, kernel)


if __name__ == "__main__":
    main()
