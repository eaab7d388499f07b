"""Which block kernel is fastest where: measures them and writes the table that ``auto`` reads.

A block is timed as a plan's executor computes it: the forward merges into an fp32 state, the
backward adds to fp32 sums, for library kernels by passes of their own.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from bench_timing import Run, time_columns
from torch import Tensor

from megatron_distflash.runtime import blocks
from megatron_distflash.runtime.kernel import (
    BackwardBlock,
    Band,
    BlockKernel,
    Direction,
    ForwardBlock,
    Rows,
    State,
)
from megatron_distflash.runtime.state import delta_of, uninitialised_state, zero_sums

HEAD_DIMS = (64, 96, 128, 192, 256)
SHAPES = ("full", "causal", "band")
TOKENS = (1024, 4096, 16384)
HEADS, KV_HEADS = 32, 8
CANDIDATES = ("cuda", "cudnn", "flash", "fa4")
NOT_EVERYWHERE = ("fa4",)  # needs a package, so the table also names who comes after it
# Two correct kernels differ by the roundings of 16-bit outputs and gradients.
TOLERANCE = 1e-2


def band_of(shape: str, tokens: int) -> Band:
    """The bounds that a block of ``shape`` has; the band is a window of half the tokens."""
    bands = {"full": Band(), "causal": Band(right=0), "band": Band(tokens // 2, 0)}
    return bands[shape]


class Block:
    """One square block with fresh random inputs and the state that kernels update."""

    def __init__(self, head_dim: int, shape: str, tokens: int) -> None:
        def normal(heads: int) -> Tensor:
            return torch.randn(tokens, 1, heads, head_dim, device="cuda", dtype=torch.bfloat16)

        self.shape, self.scale, self.band = shape, head_dim**-0.5, band_of(shape, tokens)
        self.q, self.dout = normal(HEADS), normal(HEADS)
        self.k, self.v = normal(KV_HEADS), normal(KV_HEADS)
        self.state = uninitialised_state(self.q)
        self.sums = zero_sums(self.q, self.k, self.v)
        self.out, self.lse = self.forward(self.flash(), None)
        self.delta = delta_of(self.out.contiguous(), self.dout)

    @staticmethod
    def flash() -> BlockKernel:
        """Takes every mask and head dim: the reference."""
        q = torch.empty(0, 64, dtype=torch.bfloat16, device="cuda")
        return blocks.choose("flash", "forward", q, Band(), 1, 1)

    def forward(self, kernel: BlockKernel, into: State | None) -> tuple[Tensor, Tensor]:
        block = ForwardBlock(self.q, self.k, self.v, self.band, into)
        return kernel.forward([block], self.scale)[0]

    def backward(self, kernel: BlockKernel, into: tuple) -> tuple[Tensor, ...]:
        rows = Rows(self.lse, self.delta, self.out)
        block = BackwardBlock(self.q, self.k, self.v, self.dout, rows, self.band, into)
        return kernel.backward([block], self.scale)[0]

    def run(self, direction: Direction, kernel: BlockKernel) -> Run:
        """The call to time, after a check against the reference."""
        if direction == "forward":
            _expect(kernel.name, self.forward(kernel, None), (self.out, self.lse))
            into = State(*self.state, accumulate=True)
            self.state[0].zero_(), self.state[1].fill_(-torch.inf)
            return lambda: self.forward(kernel, into)
        nothing = (None, None, None)
        _expect(kernel.name, self.backward(kernel, nothing), self.backward(self.flash(), nothing))
        return lambda: self.backward(kernel, self.sums)


def _expect(name: str, results: Iterable[Tensor], reference: Iterable[Tensor]) -> None:
    for x, expected in zip(results, reference, strict=True):
        seen = torch.isfinite(expected)
        distance = (x.double() - expected.double())[seen].norm() / expected.double()[seen].norm()
        if not distance < TOLERANCE:
            raise SystemExit(f"{name} differs from flash by {distance:.1e}, {TOLERANCE} allowed")


def candidates(block: Block, direction: Direction) -> list[BlockKernel]:
    """The kernels that can compute the block."""
    kernels = []
    tokens = block.q.shape[0]
    for name in CANDIDATES:
        try:
            kernels.append(blocks.choose(name, direction, block.q, block.band, tokens, tokens))
        except ValueError:  # says why it can't, which the table need not know
            continue
    return kernels


def ranking(block: Block, direction: Direction, turns: int) -> list[tuple[str, float]]:
    """(name, milliseconds), the fastest first."""
    runs = {kernel.name: block.run(direction, kernel) for kernel in candidates(block, direction)}
    times = time_columns(runs, turns, repeats=1)
    medians = [(name, statistics.median(each)) for name, each in times.items()]
    return sorted(medians, key=lambda pair: pair[1])


def lines(direction: str, head_dim: int, shape: str, ranked: dict[int, list[str]]) -> list[dict]:
    """The table's lines for kernels ranked by tokens: large blocks first, and no line that says
    what the next one says."""
    sizes = sorted(ranked)
    named = {size: _named(ranked[size]) for size in sizes}
    first = [s for i, s in enumerate(sizes) if i == 0 or named[s] != named[sizes[i - 1]]]
    return [
        {
            "direction": direction,
            "head_dim": head_dim,
            "shape": shape,
            "min_tokens": 0 if size == sizes[0] else size,
            "kernel": kernel,
        }
        for size in reversed(first)
        for kernel in named[size]
    ]


def _named(ranked: list[str]) -> list[str]:
    """The fastest kernel, and those behind it as long as it may be missing."""
    everywhere = [name not in NOT_EVERYWHERE for name in ranked]
    return ranked[: everywhere.index(True) + 1]


def tune(path: Path, turns: int) -> None:
    """Measure every direction, head dim and shape, and write the table to ``path``."""
    table = []
    for head_dim, shape in product(HEAD_DIMS, SHAPES):
        ranked: dict[Direction, dict[int, list[str]]] = {"forward": {}, "backward": {}}
        for tokens in TOKENS:
            block = Block(head_dim, shape, tokens)
            for direction, by_tokens in ranked.items():
                times = ranking(block, direction, turns)
                by_tokens[tokens] = [name for name, _ in times]
                cells = "  ".join(f"{name} {ms:.3f} ms" for name, ms in times)
                print(f"{direction} d{head_dim} {tokens} {shape}: {cells}", flush=True)
        for direction, by_tokens in ranked.items():
            table += lines(direction, head_dim, shape, by_tokens)
    rows = ",\n".join(f"  {json.dumps(line)}" for line in table)
    path.write_text(f"[\n{rows}\n]\n")
    print(f"wrote {len(table)} lines to {path}")
