"""Which kernel computes a block.

``auto`` follows a table of measurements, kernel_choice.json: a list of cases, of which the first
that fits a block and whose kernel does not refuse it wins. ``tools/bench_attention.py --tune``
writes it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from megatron_distflash.runtime.fa4_kernel import FlashAttention4
from megatron_distflash.runtime.hopper_kernel import Hopper
from megatron_distflash.runtime.kernel import SHAPES, Band, BlockKernel, Direction
from megatron_distflash.runtime.library_kernels import Cpu, Cudnn, Flash, must_be_deterministic

_KERNELS: dict[str, BlockKernel] = {
    kernel.name: kernel for kernel in (Cpu(), Hopper(), Cudnn(), Flash(), FlashAttention4())
}
KERNELS = ("auto", *_KERNELS)
TABLE = Path(__file__).with_name("kernel_choice.json")

_ON_GPUS = ("cuda", "cudnn", "flash")  # after the table, the first that can


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: blocks of this direction, head dim and shape (``Band.shape``), with at
    least ``min_tokens`` queries and keys, are computed fastest by ``kernel``."""

    direction: Direction
    head_dim: int
    shape: str
    min_tokens: int
    kernel: str

    def fits(self, direction: Direction, head_dim: int, shape: str, tokens: int) -> bool:
        wanted = self.direction, self.head_dim, self.shape
        return wanted == (direction, head_dim, shape) and tokens >= self.min_tokens


def read_table(path: Path) -> tuple[Case, ...]:
    """The table's cases; ValueError where it names something unknown."""
    cases = tuple(Case(**line) for line in json.loads(path.read_text()))
    for case in cases:
        known = {"direction": get_args(Direction), "shape": SHAPES, "kernel": tuple(_KERNELS)}
        for name, choices in known.items():
            value = getattr(case, name)
            if value not in choices:
                raise ValueError(f"{path} names {name} {value!r}; choose among {choices}")
    return cases


@cache
def _table() -> tuple[Case, ...]:
    return read_table(TABLE)


def candidates(
    direction: Direction,
    head_dim: int,
    shape: str,
    tokens: int,
    table: Sequence[Case] | None = None,
) -> list[str]:
    """The names that ``auto`` tries on a GPU, in this order. ``table`` None: the package's."""
    cases = _table() if table is None else table
    measured = [c.kernel for c in cases if c.fits(direction, head_dim, shape, tokens)]
    return list(dict.fromkeys((*measured, *_ON_GPUS)))


def choose(
    kernel: str, direction: Direction, q: Tensor, band: Band, rows: int, columns: int
) -> BlockKernel:
    """The kernel for one block.

    Args:
        kernel: a name from ``KERNELS``; ``auto`` takes what is fastest by measurement among those
            that can (cpu on CPU tensors).
        q: any tensor with the queries' device, dtype and head dim.

    Raises:
        ValueError: an unknown name, or no kernel can compute the block; says why.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(KERNELS)}")
    shape = band.shape(rows, columns)
    names = [kernel]
    if kernel == "auto":
        case = direction, q.shape[-1], shape, min(rows, columns)
        names = candidates(*case) if q.is_cuda else ["cpu"]
    refusals = []
    for name in names:
        refusal = _KERNELS[name].refusal(q, shape, direction)
        if refusal is None:
            return _KERNELS[name]
        refusals.append(f"{name}: {refusal}")
    kind = f"{q.dtype} on {q.device.type}, head dim {q.shape[-1]}, {shape} block"
    advice = "" if kernel == "auto" else "; choose another kernel"
    raise ValueError(f"no kernel for {kind} ({'; '.join(refusals)}){advice}")


def chosen(
    kernel: str,
    direction: Direction,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    band: Band,
    rows: int,
    columns: int,
) -> BlockKernel:
    """``choose``, remembered by what it depends on."""
    block = kernel, direction, dtype, device, head_dim, band, rows, columns
    return _chosen(must_be_deterministic(), *block)


@lru_cache(maxsize=4096)
def _chosen(
    _deterministic, kernel, direction, dtype, device, head_dim, band, rows, columns
) -> BlockKernel:
    q = torch.empty(0, head_dim, dtype=dtype, device=device)
    return choose(kernel, direction, q, band, rows, columns)
