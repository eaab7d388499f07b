"""Tensors that are not there yet: what a walk does with them is noted, to be done later.

A ``Shadow`` has the few methods of a tensor that the executor's walk, the running state and our
kernels' calls use. A walk over shadows computes nothing; it leaves notes (cpp/tape.h) that say what
a walk over tensors of these shapes and strides does, with buffers instead of addresses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGNMENT_BYTES = 256
_SPAN_BITS = 44  # more than a GPU's memory

# (kind, words, (word, buffer, offset in bytes) of its pointers, numbers, settings)
Note = tuple[str, list[int], list[tuple[int, int, int]], list[int], bytes]


class NotOnTape(Exception):
    """The walk does something that no note can say."""


class Buffer:
    """Memory of a call. It ends with the last shadow that lies in it, as a tensor's does."""

    def __init__(self, number: int, ended: list[int]) -> None:
        self.number, self._ended = number, ended

    def __del__(self) -> None:
        self._ended.append(~self.number)


@dataclass(slots=True)
class Notes:
    """What a walk did.

    Attributes:
        notes: with buffers' numbers in the order in which they were made.
        num_bytes: of each buffer.
        lives: numbers of buffers when they were made, ~number when they ended.
        kernels: what made the kernels' calls; knows their functions' addresses.
    """

    device: torch.device
    notes: list[Note] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    kernels: Any = None

    def new(self, shape: Sequence[int], dtype: torch.dtype, strides=None) -> Shadow:
        """In a buffer of its own; contiguous without ``strides``."""
        shape = torch.Size(shape)
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        number = len(self.num_bytes)
        reach = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        self.num_bytes.append((reach + 1) * dtype.itemsize if shape.numel() else 0)
        self.lives.append(number)
        return Shadow(self, Buffer(number, self.lives), 0, shape, strides, dtype)

    def call(self, kernels, name: str, form, tensors: Sequence[Shadow | None]) -> None:
        """A call of our library: ``form`` as in ``cuda_kernels``."""
        self.kernels = kernels
        present = [x for x in tensors if x is not None]
        words = memoryview(form.structures).cast("Q").tolist()
        pointers = [(word, *x.place) for word, x in zip(form.pointers, present, strict=True)]
        self.notes.append((name, words, pointers, [form.number], bytes(form.settings)))

    def copy(self, to: Shadow, source: Shadow) -> None:
        if (to.shape, to.dtype) != (source.shape, source.dtype):
            raise NotOnTape(f"a copy from {source} to {to}")
        stack = _stack(to.shape, to.stride(), source.stride())
        if stack is None:
            return
        (num_blocks, *blocks), (num_rows, *rows), num = stack
        size = to.dtype.itemsize
        extent = [num * size, num_rows, num_blocks]
        pitches = [x * size for pair in zip(rows, blocks, strict=True) for x in pair]
        if any(block % row for row, block in zip(rows, blocks, strict=True)):
            raise NotOnTape(f"a copy from {source} to {to}")
        pointers = [(0, *to.place), (1, *source.place)]
        self.notes.append(("copy", [0, 0], pointers, pitches + extent, b""))

    def fill(self, x: Shadow, value: float) -> None:
        stack = _stack(x.shape, x.stride())
        if stack is None:
            return
        (num_blocks, _), (num_rows, row), num = stack
        if num_blocks > 1 or x.dtype is not torch.float32:
            raise NotOnTape(f"filling {x}")
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        numbers = [4 * row, 4 * num, num_rows, word]
        self.notes.append(("fill", [0], [(0, *x.place)], numbers, b""))

    def open(self, step_idx: int, sent: Sequence[Shadow]) -> None:
        pointers = [(idx, *x.place) for idx, x in enumerate(sent)]
        self.notes.append(("open", [0] * len(sent), pointers, [step_idx], b""))

    def close(self) -> None:
        self.notes.append(("close", [], [], [], b""))


class Shadow:
    """Of a tensor; ``place``: its buffer's number and the first element's offset in bytes."""

    __slots__ = ("_offset", "_strides", "buffer", "dtype", "notes", "shape")

    def __init__(self, notes, buffer, offset, shape, strides, dtype) -> None:
        self.notes, self.buffer, self.dtype = notes, buffer, dtype
        self.shape, self._strides, self._offset = torch.Size(shape), tuple(strides), offset

    def __repr__(self) -> str:
        return f"shadow {list(self.shape)} of strides {list(self._strides)}, {self.dtype}"

    # -- as of a tensor -------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.notes.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def place(self) -> tuple[int, int]:
        return self.buffer.number, self._offset * self.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None):
        return self._strides if dim is None else self._strides[dim]

    def storage_offset(self) -> int:
        return self._offset

    def data_ptr(self) -> int:
        """Not an address, but as aligned as one and another for each element."""
        number, offset_bytes = self.place
        return (number + 1 << _SPAN_BITS) + offset_bytes

    def as_strided(self, shape, strides, offset: int) -> Shadow:
        return Shadow(self.notes, self.buffer, offset, shape, strides, self.dtype)

    def permute(self, *dims: int) -> Shadow:
        shape, strides = ([x[dim] for dim in dims] for x in (self.shape, self._strides))
        return self.as_strided(shape, strides, self._offset)

    def is_contiguous(self) -> bool:
        pairs = zip(self.shape, self._strides, contiguous_strides(self.shape), strict=True)
        return not self.shape.numel() or all(n == 1 or a == b for n, a, b in pairs)

    def contiguous(self) -> Shadow:
        return self if self.is_contiguous() else self.new_empty(self.shape).copy_(self)

    def new_empty(self, shape, dtype: torch.dtype | None = None) -> Shadow:
        return self.notes.new(shape, dtype or self.dtype)

    def new_zeros(self, shape, dtype: torch.dtype | None = None) -> Shadow:
        return self.new_empty(shape, dtype).zero_()

    def zero_(self) -> Shadow:
        return self.fill_(0.0)

    def fill_(self, value: float) -> Shadow:
        self.notes.fill(self, value)
        return self

    def copy_(self, source: Shadow) -> Shadow:
        self.notes.copy(self, source)
        return self

    def _refuse(self, *_args, **_options):
        raise NotOnTape(f"arithmetic of torch's on a {self}")

    to = unsqueeze = add_ = lerp_ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __eq__ = _refuse
    __hash__ = None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _stack(shape: Sequence[int], *strides: Sequence[int]):
    """The same elements of several tensors as blocks of rows of neighbours, in elements.

    Returns:
        ((blocks, each tensor's step), (rows, each tensor's step), elements of a row); None: there
        are none.
    """
    if 0 in shape:
        return None
    dims = [(n, *steps) for n, *steps in zip(shape, *strides, strict=True) if n > 1]
    dims.sort(key=lambda dim: dim[1:], reverse=True)
    merged: list[tuple[int, ...]] = []
    for num, *steps in dims:
        if merged and all(x == num * y for x, y in zip(merged[-1][1:], steps, strict=True)):
            num *= merged.pop()[0]
        merged.append((num, *steps))
    are_neighbours = merged and all(step == 1 for step in merged[-1][1:])
    num = merged.pop()[0] if are_neighbours else 1
    if len(merged) > 2:
        raise NotOnTape(f"{list(shape)} of strides {list(map(list, strides))} as blocks of rows")
    rows = merged.pop() if merged else (1, *[num] * len(strides))
    blocks = merged.pop() if merged else (1, *[rows[0] * step for step in rows[1:]])
    if any(step < num for step in rows[1:]) or any(
        block < rows[0] * row for block, row in zip(blocks[1:], rows[1:], strict=True)
    ):
        raise NotOnTape(f"{list(shape)} of strides {list(map(list, strides))}: rows overlap")
    return blocks, rows, num
