"""How much of the transfers hides under attention, and what it costs attention.

Run one process per rank, each with its GPU (several ranks may share one where NCCL allows it):

    torchrun --nproc-per-node 4 tools/bench_overlap.py
    torchrun --nproc-per-node 4 tools/bench_overlap.py --comm nccl --ctas 2 --trace out/trace

Before anything is timed, results are compared with one-rank attention's. Three ways of running a
call (the whole forward, or forward and backward), ``--calls`` of them one after the other as the
layers of a model are, each the median of ``--repeats`` (of both also half the range), slowest rank,
ms per call:

    compute    the same kernels and merges on random buffers, nothing is moved
    transfers  the same transfers with nothing to compute
    both       the real thing

and from them:

    hidden     1 - (both - compute) / transfers
    slowdown   of the compute stream's own work while transfers run: the time between a step's post
               and its wait, summed over the steps, the ranks' mean, against the same without
               transfers
    exposed    the rest of both: the compute stream stands still in waits, for transfers or because
               the rank has less to compute than the slowest one

``post`` is the host's time to hand one whole forward to the C++ module, with nothing to compute.

With --budget-s nothing is begun that would not end in time, and with --json a later run with the
same options goes on with the rows that are missing.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_unmoved import Unmoved  # noqa: E402
from own_gpu import own_gpu  # noqa: E402

from megatron_distflash.plan import Mask, Plan, build, build_backward  # noqa: E402
from megatron_distflash.plan.lower import PREFETCH  # noqa: E402
from megatron_distflash.runtime import reference, tape  # noqa: E402
from megatron_distflash.runtime.native import NativeExecutor, NativeTransport, Options  # noqa: E402
from megatron_distflash.runtime.program import wires_of  # noqa: E402

NAMES = ("out", "dq", "dk", "dv")
WARM_UPS, LEAST_REPEATS = 2, 3
TOLERANCE = 0.02  # relative error of bf16 attention against one-rank attention in bf16


class Timed:
    """Another transport, with events around each step's work on the compute stream."""

    def __init__(self, transport: reference.Transport) -> None:
        self._transport = transport
        self.targets = transport.targets
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def post(self, step_idx, sends, receives) -> None:
        self._transport.post(step_idx, sends, receives)
        if step_idx == 0:
            self._events.clear()
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        self._events.append((begin, torch.cuda.Event(enable_timing=True)))

    def wait(self) -> None:
        self._events[-1][1].record()
        self._transport.wait()

    def work_ms(self) -> float:
        """After a synchronisation: the steps' own work in the last call."""
        return sum(begin.elapsed_time(end) for begin, end in self._events)


class Bench:
    """One shape on one rank."""

    def __init__(self, args: argparse.Namespace, tokens: int, device: torch.device) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.args, self.tokens = args, tokens
        options = {
            "num_heads": args.heads,
            "num_kv_heads": args.kv_heads,
            "mask": Mask.causal(),
            "prefetch": args.prefetch,
            "cut": not args.no_cut,
        }
        lengths = (tokens,) * self.num_ranks
        self.forward_plan: Plan = build(args.schedule, lengths, **options)
        self.backward_plan: Plan = build_backward(args.schedule, lengths, **options)
        generator = torch.Generator(device).manual_seed(args.seed)
        heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
        # Everybody draws the whole sequence, so that one-rank attention can be computed.
        self.whole = [
            torch.randn(
                tokens * self.num_ranks, 1, h, args.head_dim, generator=generator, device=device
            ).to(torch.bfloat16)
            for h in heads
        ]
        mine = slice(tokens * self.rank, tokens * (self.rank + 1))
        self.q, self.k, self.v, self.dout = [x[mine].clone() for x in self.whole]

    def plans(self) -> list[Plan]:
        return (
            [self.forward_plan, self.backward_plan] if self.args.backward else [self.forward_plan]
        )

    def transports(self, executor: NativeExecutor) -> list[NativeTransport]:
        """One for each plan, which expect our kernels where attention would let them."""
        made = [executor.transport(plan, self.k) for plan in self.plans()]
        for plan, transport in zip(self.plans(), made, strict=True):
            is_ours = tape.is_ours(plan, self.rank, self.args.kernel, self.k)
            transport.expect(gives_way=is_ours)
        return made

    def call(self, transports: list) -> list[Tensor]:
        """out; with --backward also dq, dk, dv."""
        options = {"scale": self.args.head_dim**-0.5, "kernel": self.args.kernel}
        local = self.q, self.k, self.v
        out, lse = reference.forward(
            self.forward_plan, self.rank, *local, transport=transports[0], **options
        )
        if not self.args.backward:
            return [out]
        grads = reference.backward(
            self.backward_plan, self.rank, self.dout, *local, out, lse,
            transport=transports[1], **options,
        )  # fmt: skip
        return [out, *grads]

    def check(self, transports: list) -> None:
        """Against torch's attention over the whole sequence, the last KV head."""
        group = self.args.heads // self.args.kv_heads
        q, k, v, dout = (
            x[:, :, -count:].permute(1, 2, 0, 3)
            for x, count in zip(self.whole, (group, 1, 1, group), strict=True)
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )
        wanted = [out, *torch.autograd.grad(out, leaves, dout)]
        mine = slice(self.tokens * self.rank, self.tokens * (self.rank + 1))
        for name, x, whole in zip(NAMES, self.call(transports), wanted, strict=False):
            own = whole.permute(2, 0, 1, 3)[mine].float()
            error = ((x[:, :, -own.shape[2] :].float() - own).norm() / own.norm()).item()
            if not error < TOLERANCE:
                raise AssertionError(f"rank {self.rank}: {name} is off by {error:.1e}")

    def transfers(self, transports: list) -> Callable[[], None]:
        """One call's posts and waits without any compute."""
        scratch: dict = {}

        def source(transfer, wires) -> list[Tensor]:
            if transfer not in scratch:
                scratch[transfer] = [
                    torch.randn(wire.shape, device=self.q.device).to(wire.dtype) for wire in wires
                ]
            return scratch[transfer]

        work = []
        for plan, transport in zip(self.plans(), transports, strict=True):
            for step_idx, step in enumerate(plan.steps[self.rank]):
                ends = []
                for moved in (step.sends, step.receives):
                    wires = [
                        wires_of(plan, t, 1, self.args.head_dim, torch.bfloat16) for t in moved
                    ]
                    ends.append([(t, source(t, w)) for t, w in zip(moved, wires, strict=True)])
                work.append((transport, step_idx, *ends))

        def run() -> None:
            for transport, step_idx, sends, receives in work:
                transport.post(step_idx, sends, receives)
                transport.wait()

        return run


def once(
    call: Callable[[], object], calls: int, each: Callable[[], float] = lambda: 0.0
) -> tuple[float, float]:
    """The slowest rank's ms for each of ``calls`` calls in a row, and the ranks' mean of ``each()``
    for the last of them."""
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    own = torch.tensor([(time.perf_counter() - begun) * 1e3 / calls, each()])
    slowest, mean = own.clone(), own.clone()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    return slowest[0].item(), mean[1].item() / dist.get_world_size()


def post_us(bench: Bench, transport, repeats: int = 20) -> float:
    """Median host time of one forward's calls into C++, slowest rank, after a warm-up."""
    executor, plan = transport.executor, bench.forward_plan
    stream = torch.cuda.current_stream().cuda_stream
    sources = [
        [
            torch.empty(wire.shape, dtype=wire.dtype, device=bench.q.device)
            for transfer in step.sends
            for wire in wires_of(plan, transfer, 1, bench.args.head_dim, torch.bfloat16)
        ]
        for step in plan.steps[bench.rank]
    ]
    pointers = [[x.data_ptr() for x in tensors] for tensors in sources]
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        executor.begin(stream)
        for step_idx, step_pointers in enumerate(pointers):
            executor.post(step_idx, step_pointers, stream)
            executor.wait(step_idx + 1, stream)
        executor.finish(stream)
        slowest = torch.tensor([(time.perf_counter() - begun) * 1e6])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        samples.append(slowest.item())
    torch.cuda.synchronize()
    return statistics.median(samples[2:])


class Clock:
    """The time that is left, as the first rank sees it, so that all decide alike."""

    def __init__(self, budget_s: float | None) -> None:
        self._end = math.inf if budget_s is None else time.monotonic() + budget_s

    def left_s(self) -> float:
        left = [self._end - time.monotonic()]
        dist.broadcast_object_list(left)
        return left[0]


def row(bench: Bench, executor: NativeExecutor, repeats: int, calls: int, clock: Clock) -> dict:
    """Columns by name; fewer repeats where time is short, and none of them where it is too short.

    The three ways take turns, so that a clock that drifts is the same for all.
    """
    transports = bench.transports(executor)
    bench.check(transports)
    unmoved = Unmoved(math.log(bench.num_ranks * bench.tokens))
    real, still = [Timed(t) for t in transports], [Timed(unmoved) for _ in transports]
    only_transfers = bench.transfers(transports)
    samples = []
    while len(samples) < repeats + WARM_UPS:
        begun_s = clock.left_s()
        compute = once(lambda: bench.call(still), calls, lambda: sum(t.work_ms() for t in still))
        transfers = once(only_transfers, calls)
        both = once(lambda: bench.call(real), calls, lambda: sum(t.work_ms() for t in real))
        samples.append((*compute, transfers[0], *both))
        left_s = clock.left_s()
        if left_s < begun_s - left_s:  # no time for one more
            break
    if len(samples) < WARM_UPS + LEAST_REPEATS:
        return {}
    columns = list(zip(*samples[WARM_UPS:], strict=True))
    compute_ms, alone_ms, transfers_ms, both_ms, work_ms = map(statistics.median, columns)
    return {
        "compute_ms": compute_ms,
        "transfers_ms": transfers_ms,
        "both_ms": both_ms,
        "spread_ms": (max(columns[3]) - min(columns[3])) / 2,
        "hidden": 1 - (both_ms - compute_ms) / transfers_ms,
        "slowdown": work_ms / alone_ms - 1,
        "exposed": 1 - work_ms / both_ms,
        "post_us": post_us(bench, transports[0]),
        "repeats": len(columns[0]),
    }


def text_of(cell: dict, row: dict) -> str:
    name = f"{cell['comm']} {cell['ctas'] or ''}"
    return (
        f"{name:8} {cell['order'] or 'default':8} {cell['tokens']:6} {row['compute_ms']:9.3f} "
        f"{row['transfers_ms']:9.3f} {row['both_ms']:9.3f} ± {row['spread_ms']:6.3f} "
        f"{row['hidden']:8.1%} {row['slowdown']:9.1%} {row['exposed']:8.1%} "
        f"{row['post_us']:8.0f}"
    )


def trace(bench: Bench, executor: NativeExecutor, path: Path) -> None:
    """One call's Chrome trace, and what ran on the GPU as a table: start and end in µs, stream."""
    transports = bench.transports(executor)
    bench.call(transports)
    torch.cuda.synchronize()
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        dist.barrier()
        bench.call(transports)
        torch.cuda.synchronize()
    dist.barrier()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{path}.json.gz")
    with gzip.open(f"{path}.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"].get("stream"), event["name"])
        for event in events
        if event.get("cat") in kinds
    )
    origin = torch.tensor(work[0][0], dtype=torch.float64)
    dist.all_reduce(origin, dist.ReduceOp.MIN)  # one clock for all ranks
    lines = [
        f"{begin - origin.item():9.1f} {end - origin.item():9.1f}  stream {stream}: {name[:70]}"
        for begin, end, stream, name in work
    ]
    Path(f"{path}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args()
    device = own_gpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    clock = Clock(args.budget_s)
    settings = settings_of(args, device)
    if dist.get_rank() == 0:
        print(title(args, settings), flush=True)
    missing = measure_all(args, device, settings, clock)
    if missing and dist.get_rank() == 0:
        again = "run again with this --json" if args.json else "give more --budget-s"
        print(f"no time was left for {len(missing)} rows; {again}: {'; '.join(missing)}")
    dist.destroy_process_group()


def settings_of(args: argparse.Namespace, device: torch.device) -> dict:
    """All that rows of one table have in common."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "schedule": args.schedule,
        "backward": args.backward,
        "prefetch": args.prefetch,
        "cut": not args.no_cut,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "kernel": args.kernel,
        "repeats": args.repeats,
        "calls": args.calls,
        "in_progress": args.in_progress,
    }


def title(args: argparse.Namespace, settings: dict) -> str:
    what = "forward and backward" if args.backward else "forward"
    cut = "not cut" if args.no_cut else "cut"
    return (
        f"{settings['gpu']}, {settings['multiprocessors']} multiprocessors per rank, "
        f"torch {torch.__version__}, P = {settings['ranks']}, {args.schedule} {what}, "
        f"prefetch {args.prefetch}, {cut}, {args.heads}/{args.kv_heads} heads, d {args.head_dim}, "
        f"bf16, {args.kernel} kernels, median of {args.repeats}; ms, µs for post\n"
        f"{'comm':8} {'order':8} {'tokens':>6}   compute transfers      both            hidden"
        "  slowdown  exposed     post"
    )


def measure_all(
    args: argparse.Namespace, device: torch.device, settings: dict, clock: Clock
) -> list[str]:
    """Prints the rows, those that --json holds too; returns the names of those that are missing."""
    rows, missing = read_rows(args.json), []
    ctas = {"nccl": args.ctas, "copy": [0]}
    for comm in args.comm:
        for max_ctas, order in itertools.product(ctas[comm], args.order):
            cells = [
                {"comm": comm, "ctas": max_ctas, "order": order, "tokens": tokens}
                for tokens in args.tokens
            ]
            with executor_for(args, device, cells[0]) as executor:
                for cell in cells:
                    key = json.dumps({**settings, **cell}, sort_keys=True)
                    if key not in rows and clock.left_s() > 0:
                        found = measure(args, device, cell, executor(), clock)
                        if found:
                            rows[key] = found
                            write_rows(args.json, rows)
                    if key not in rows:
                        missing.append(f"{comm} {max_ctas or ''} {order or ''} {cell['tokens']}")
                    elif dist.get_rank() == 0:
                        print(text_of(cell, rows[key]), flush=True)
    return [" ".join(name.split()) for name in missing]


@contextlib.contextmanager
def executor_for(
    args: argparse.Namespace, device: torch.device, cell: dict
) -> Iterator[Callable[[], NativeExecutor]]:
    """Gives what makes the cells' executor, once one of them needs it."""
    limits = {"max_ctas": cell["ctas"], "is_blocking": not args.in_progress}
    late = cell["order"] == "late"
    how = {"late": late, "hold": None if late else cell["order"]} if cell["order"] else {}
    options, made = Options(**how, **limits), []

    def make() -> NativeExecutor:
        if not made:
            group = dist.group.WORLD
            made.append(NativeExecutor(group, cell["comm"], device, timeout_s=60, options=options))
        return made[0]

    yield make
    for executor in made:
        executor.close()


def measure(
    args: argparse.Namespace,
    device: torch.device,
    cell: dict,
    executor: NativeExecutor,
    clock: Clock,
) -> dict:
    """A row, and its trace."""
    bench = Bench(args, cell["tokens"], device)
    found = row(bench, executor, args.repeats, args.calls, clock)
    if args.trace is not None:
        name = f"{cell['comm']}{cell['ctas'] or ''}_{cell['order'] or 'default'}"
        trace(bench, executor, args.trace / f"{name}_{cell['tokens']}_rank{dist.get_rank()}")
    return found


def read_rows(path: Path | None) -> dict[str, dict]:
    """Those of earlier runs, as the first rank reads them."""
    rows = [{}]
    if path is not None and dist.get_rank() == 0 and path.exists():
        rows = [json.loads(path.read_text(encoding="utf-8"))]
    dist.broadcast_object_list(rows)
    return rows[0]


def write_rows(path: Path | None, rows: dict[str, dict]) -> None:
    if path is None or dist.get_rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    new.replace(path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--comm", nargs="+", default=["nccl", "copy"], choices=["nccl", "copy"])
    parser.add_argument("--ctas", nargs="+", type=int, default=[1, 2, 4], help="for NCCL")
    parser.add_argument("--in-progress", action="store_true", help="NCCL calls do not block")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--schedule", default="balanced")
    parser.add_argument("--prefetch", type=int, default=PREFETCH)
    parser.add_argument("--no-cut", action="store_true", help="a plan whose ends are not cut")
    orders = ["late", "never", "first", "always"]
    parser.add_argument(
        "--order",
        nargs="+",
        default=[None],
        choices=orders,
        help="transfers posted after a step's kernels (late), or before, with compute held until "
        "they have begun: never, for the first ones of a call, or always",
    )
    parser.add_argument("--kernel", default="cudnn")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--trace", type=Path, help="folder for a trace of one call per rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--budget-s", type=float, help="seconds to measure in")
    parser.add_argument("--json", type=Path, help="keeps the rows, and says which are done")
    parser.add_argument("--calls", type=int, default=4, help="in a row, in each repeat")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
