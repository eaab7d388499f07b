#!/usr/bin/env python
"""The host's time for one call of the executor: what Python does while the GPU computes.

    python tools/bench_host.py
    python tools/bench_host.py --ranks 2 4 8 --schedule balanced zigzag
    python tools/bench_host.py --kernel cuda --profile

Runs on any machine, on small CPU tensors. Nothing is computed and nothing is moved, so that only
our own code counts: the walk over the plan, the views and new tensors, and with the kernel

    none    nothing else: kernels return the tensors that they were given
    cuda    all that our kernels' calls need up to the C functions, and calls of a C function that
            does nothing

A GPU is idle whenever its kernels take less time than this. Every line is one rank: microseconds
per call (the median, and the quickest), and per step. They are this thread's time on a CPU, so that
others on the same machine disturb little.
"""

import argparse
import contextlib
import cProfile
import ctypes
import ctypes.util
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_unmoved import Unmoved  # noqa: E402

from megatron_distflash.plan import SCHEDULES, Mask, Plan, build, build_backward  # noqa: E402
from megatron_distflash.runtime import blocks, hopper_kernel, program, reference, state  # noqa: E402
from megatron_distflash.runtime.cuda_kernels import CudaKernels  # noqa: E402

KERNELS = ("none", "cuda")


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


def calls(
    both: tuple[Plan, Plan], rank: int, shape: Shape
) -> tuple[Callable[[], object], Callable[[], object]]:
    """One rank's (forward, backward), inside ``nothing_runs``."""
    q, dout, out = (shape.random(shape.heads) for _ in range(3))
    k, v = (shape.random(shape.kv_heads) for _ in range(2))
    lse = state.empty_rows(q).fill_(1.0)
    how = {"scale": shape.head_dim**-0.5, "kernel": "cpu"}
    moves = Still(), Still()
    return (
        lambda: reference.forward(both[0], rank, q, k, v, **how, transport=moves[0]),
        lambda: reference.backward(
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
                call = calls(both, rank, shape)[way]
                times = microseconds(call, args.turns)
                median, steps = statistics.median(times), both[way].num_steps
                print(
                    f"{schedule:>9} {num_ranks:>5} {rank:>5} {kernel:>6} {name:>9} {median:>8.0f} "
                    f"{min(times):>8.0f} {steps:>6} {median / steps:>8.1f}",
                    flush=True,
                )
                slowest = max(slowest, (median, call), key=lambda x: x[0])
            if args.profile and slowest[1] is not None:
                profile(slowest[1], args.turns)


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
    parser.add_argument("--profile", action="store_true", help="of each direction's slowest rank")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    print(
        f"{'schedule':>9} {'ranks':>5} {'rank':>5} {'kernel':>6} {'direction':>9} {'us/call':>8} "
        f"{'quickest':>8} {'steps':>6} {'us/step':>8}"
    )
    for schedule in args.schedule:
        for num_ranks in args.ranks:
            for kernel in args.kernel:
                report(args, schedule, num_ranks, kernel)


if __name__ == "__main__":
    main()
