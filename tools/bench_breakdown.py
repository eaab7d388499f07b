"""What one rank's kernels take, by kind, with nothing moved: attention, row kernels, copies, fills,
and the gaps between launches.

    python tools/bench_breakdown.py --ranks 4 --rank 3      # on the whole GPU
    python tools/bench_breakdown.py --list                  # and every launch in time order

With RANK and WORLD_SIZE in its environment a process is one rank of a node; all of them begin
together where they are given the same --meeting.

The plan is computed on random tensors in the place of transfers (as in bench_attention.py
--replay). Times are torch.profiler's, of one forward and one backward after a warm-up; ``gaps`` is
the time between the first launch's begin and the last one's end in which nothing of this rank ran.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_attention_replay import Replay

MEETING_S = 60.0

# What the name of a launch contains, and what kind that makes it; the first that fits.
KINDS = (
    ("merge_kernel", "merge"),
    ("accumulate_kernel", "add"),
    ("cast_kernel", "cast"),
    ("delta_kernel", "delta"),
    ("stand_in_kernel", "delta"),
    ("forward_kernel", "attention"),
    ("backward_kernel", "attention"),
    ("cudnn", "attention"),
    ("flash_", "attention"),
    ("Memset", "fill"),
    ("FillFunctor", "fill"),
    ("Memcpy", "copy"),
    ("copy", "copy"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    name: str
    start_us: float
    us: float

    @property
    def kind(self) -> str:
        return next((kind for part, kind in KINDS if part in self.name), "other")

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Launches of one pass, in time order."""

    launches: list[Launch]

    @property
    def whole_us(self) -> float:
        return max(x.end_us for x in self.launches) - self.launches[0].start_us

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """(launches, microseconds) of each kind; gaps: how many above 1 µs."""
        found: dict[str, list[float]] = defaultdict(list)
        for launch in self.launches:
            found[launch.kind].append(launch.us)
        gaps = [gap for gap in self.gaps_us() if gap > 0]
        sums = {kind: (len(us), sum(us)) for kind, us in found.items()}
        return sums | {"gaps": (sum(gap > 1 for gap in gaps), sum(gaps))}

    def gaps_us(self) -> list[float]:
        """Before each launch: how long nothing ran."""
        gaps, end = [], self.launches[0].start_us
        for launch in self.launches:
            gaps.append(launch.start_us - end)
            end = max(end, launch.end_us)
        return gaps

    def print_list(self) -> None:
        for launch, gap in zip(self.launches, self.gaps_us(), strict=True):
            print(f"  {gap:9.1f} gap {launch.us:9.1f} us  {launch.kind:9}  {_short(launch.name)}")


def median_ms(run: Callable[[], object], turns: int) -> float:
    """Of calls issued back to back, as in training."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def profiled(run: Callable[[], object]) -> Breakdown:
    """The second of three passes issued back to back: others of a node are busy meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    mark = torch.zeros(1, device="cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            torch.sin(mark)  # sets passes apart
            run()
        torch.cuda.synchronize()
    events = [
        Launch(e.name(), e.start_ns() / 1e3, e.duration_ns() / 1e3)
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
        and not e.name().startswith("distflash step")
    ]
    events.sort(key=lambda launch: launch.start_us)
    marks = [idx for idx, launch in enumerate(events) if "sin_kernel" in launch.name]
    return Breakdown(events[marks[1] + 1 : marks[2]])


def _short(name: str) -> str:
    name = name.replace("void ", "").replace("distflash::", "").replace("at::native::", "")
    return name.replace("(anonymous namespace)::", "")[:100]


def meet(folder: Path, rank: int, num_ranks: int, what: str) -> None:
    """All ranks of a node begin together; by files, since nothing else connects them here."""
    (folder / f"{what}.{rank}").touch()
    end = time.monotonic() + MEETING_S
    while len(list(folder.glob(f"{what}.*"))) < num_ranks:
        if time.monotonic() > end:
            raise SystemExit(f"not all of {num_ranks} ranks came to {what} within {MEETING_S} s")
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_node = "WORLD_SIZE" in os.environ
    parser.add_argument("--ranks", type=int, default=int(os.environ.get("WORLD_SIZE", 4)))
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", 0)))
    parser.add_argument("--tokens", type=int, default=8192, help="per rank")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--schedule", default="balanced")
    parser.add_argument("--kernel", default="cuda")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--list", action="store_true", help="print every launch")
    parser.add_argument("--json", type=Path, help="write the launches there")
    parser.add_argument("--meeting", type=Path, help="an empty folder shared by a node's ranks")
    args = parser.parse_args()
    if on_node and args.meeting is None:
        parser.error("ranks of a node need --meeting FOLDER to begin together")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU, and kernels on the CPU are none of this.")
    sizes = args.ranks, args.tokens, args.heads, args.kv_heads, args.head_dim
    replay, found = Replay(*sizes, args.schedule, args.kernel), {}
    passes = replay.passes(args.ranks, args.tokens, args.rank)
    for name, run in zip(("forward", "backward"), passes, strict=True):
        run(), torch.cuda.synchronize()
        if on_node:
            meet(args.meeting, args.rank, args.ranks, f"{name}-time")
        ms = median_ms(run, args.turns)
        if on_node:
            meet(args.meeting, args.rank, args.ranks, f"{name}-profile")
        breakdown = profiled(run)
        found[name] = {
            "ms": ms,
            "whole_us": breakdown.whole_us,
            "by_kind": breakdown.by_kind(),
            "launches": [(x.name, x.start_us, x.us) for x in breakdown.launches],
        }
        cells = [
            f"{kind} {num} x {us / 1e3:.3f}"
            for kind, (num, us) in sorted(breakdown.by_kind().items(), key=lambda x: -x[1][1])
        ]
        print(
            f"P {args.ranks} rank {args.rank} {name}: {ms:.3f} ms; profiled "
            f"{breakdown.whole_us / 1e3:.3f}: {', '.join(cells)}",
            flush=True,
        )
        if args.list:
            breakdown.print_list()
    if args.json:
        args.json.write_text(json.dumps({"args": vars(args), **found}, default=str))


if __name__ == "__main__":
    main()
