"""Our kernels' library (kernels/api.h) as C functions that compute on the CPU: what crosses to C is
taken apart again, so wrong pointers, strides and sizes give wrong numbers."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from megatron_distflash.runtime import hopper_kernel, state
from megatron_distflash.runtime.cuda_kernels import CudaKernels
from megatron_distflash.runtime.cuda_tasks import (
    DTYPES,
    MASKS,
    BackwardStructure,
    BackwardTask,
    BlockStructure,
    ForwardStructure,
    ForwardTask,
    Mask,
    Options,
    Shape,
    View,
)
from tests.runtime.fake_kernels import FakeKernels, on_the_cpu

_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_MASKS = {code: kind for kind, code in MASKS.items()}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int32
_ROW_CALLS = {"merge": 4, "finish": 5, "delta": 3, "accumulate": 2, "cast": 2, "stand_in": 3}


class FakeLibrary:
    """Has the functions of the library; each can be called from Python and from C.

    Attributes:
        names: of the functions that were called.
        shifts: tiles_per_shift of each launch.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._kernels = FakeKernels()
        self.shifts = self._kernels.shifts
        self._complaint = ctypes.create_string_buffer(2000)
        for name in ("forward", "backward"):
            signature = ctypes.CFUNCTYPE(_POINTER, _POINTER, _NUMBER, _POINTER, _POINTER)
            self._define(name, signature, getattr(self, f"_{name}"))
        for name, num_views in _ROW_CALLS.items():
            views = [_POINTER] * num_views
            signature = ctypes.CFUNCTYPE(_POINTER, _POINTER, *views, _NUMBER, _POINTER)
            self._define(name, signature, getattr(self, f"_{name}", _missing))
        self.distflash_check_device = ctypes.CFUNCTYPE(_POINTER)(lambda: None)

    def _define(self, name: str, signature, function: Callable) -> None:
        def call(*arguments) -> int | None:
            self.names.append(name)
            try:
                function(*arguments[:-1])
            except Exception as error:  # nothing goes through C
                self._complaint.value = f"{type(error).__name__}: {error}".encode()
                return ctypes.addressof(self._complaint)
            return None

        setattr(self, f"distflash_{name}", signature(call))

    def _forward(self, tasks: int, num_tasks: int, options: int) -> None:
        settings = Options.from_address(options)
        dtype, dim = _DTYPES[settings.dtype], settings.head_dim
        taken = []
        for task in (ForwardStructure * num_tasks).from_address(tasks):
            block = task.block
            queries, keys = _extents(block, dim)
            acc, out = task.out_acc, task.out
            taken.append(
                ForwardTask(
                    _tensor(task.q, queries, dtype),
                    _tensor(task.k, keys, dtype),
                    _tensor(task.v, keys, dtype),
                    _rows(task.lse, queries),
                    _tensor(acc, queries, torch.float32) if acc.data or block.q_len == 0 else None,
                    _tensor(out, queries, dtype) if out.data else None,
                    _mask(block),
                    accumulate=bool(task.accumulate),
                )
            )
        self._kernels.forward_accumulate(
            taken,
            softmax_scale=settings.softmax_scale,
            tiles_per_shift=settings.tiles_per_shift,
        )

    def _backward(self, tasks: int, num_tasks: int, options: int) -> None:
        settings = Options.from_address(options)
        dtype, dim = _DTYPES[settings.dtype], settings.head_dim
        taken = []
        for task in (BackwardStructure * num_tasks).from_address(tasks):
            queries, keys = _extents(task.block, dim)
            inputs = [(task.q, queries), (task.k, keys), (task.v, keys), (task.dout, queries)]
            sums = [(task.dq, queries), (task.dk, keys), (task.dv, keys)]
            taken.append(
                BackwardTask(
                    *(_tensor(view, extents, dtype) for view, extents in inputs),
                    _rows(task.lse, queries),
                    _rows(task.delta, queries),
                    *(_tensor(view, extents, torch.float32) for view, extents in sums),
                    _mask(task.block),
                )
            )
        self._kernels.backward_accumulate(
            taken,
            softmax_scale=settings.softmax_scale,
            tiles_per_shift=settings.tiles_per_shift,
            deterministic=bool(settings.deterministic),
        )

    def _merge(self, shape, acc, acc_lse, o, o_lse, code, out=None) -> None:
        extents = _shape(shape)
        total, part = _at(acc, extents, torch.float32), _at(o, extents, _DTYPES[code])
        lse, part_lse = _rows_at(acc_lse, extents), _rows_at(o_lse, extents)
        weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0)
        weight = weight.permute(2, 0, 1).unsqueeze(-1)
        merged = torch.lerp(total, part.float(), weight)
        lse.copy_(torch.logaddexp(lse, part_lse))
        if out is None:
            total.copy_(merged)
        else:
            _at(out, extents, _DTYPES[code]).copy_(merged)

    def _finish(self, shape, acc, acc_lse, o, o_lse, out, code) -> None:
        self._merge(shape, acc, acc_lse, o, o_lse, code, out)

    def _delta(self, shape, o, dout, delta, code) -> None:
        extents = _shape(shape)
        a, b = (_at(x, extents, _DTYPES[code]).float() for x in (o, dout))
        _rows_at(delta, extents).copy_((a * b).sum(-1).permute(1, 2, 0))

    def _accumulate(self, shape, acc, x, code) -> None:
        extents = _shape(shape)
        _at(acc, extents, torch.float32).add_(_at(x, extents, _DTYPES[code]))

    def _cast(self, shape, out, acc, code) -> None:
        extents = _shape(shape)
        _at(out, extents, _DTYPES[code]).copy_(_at(acc, extents, torch.float32))


class KernelsOnCpu(CudaKernels):
    """Calls of a library that takes CPU tensors."""

    def _call(self, name, device, *arguments) -> None:
        message = getattr(self._library, f"distflash_{name}")(*arguments, ctypes.c_void_p(0))
        if message is not None:
            raise RuntimeError(f"distflash_{name}: {message.decode()}")


@contextlib.contextmanager
def library_on_the_cpu() -> Iterator[FakeLibrary]:
    """Attention's kernel ``cuda`` and the row kernels are C functions; memory that is not
    initialised holds NaN."""
    library = FakeLibrary()
    kernels = KernelsOnCpu(library)
    with (
        on_the_cpu(),
        mock.patch.object(hopper_kernel, "_kernels", lambda: kernels),
        mock.patch.object(state, "_row_kernels", lambda *tensors: kernels),
    ):
        yield library


def _missing(*_arguments) -> None:
    raise AssertionError("attention with our own kernels does not call this")


def _mask(block: BlockStructure) -> Mask:
    return Mask(_MASKS[block.mask], block.offset, block.window)


def _extents(block: BlockStructure, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """[s, b, h, d] of queries, and of keys."""
    queries = block.q_len, block.batch, block.q_heads, head_dim
    return queries, (block.k_len, block.batch, block.kv_heads, head_dim)


def _shape(address: int) -> tuple[int, ...]:
    shape = Shape.from_address(address)
    return shape.seq, shape.batch, shape.heads, shape.head_dim


def _at(address: int, extents, dtype: torch.dtype) -> Tensor:
    return _tensor(View.from_address(address), extents, dtype)


def _rows_at(address: int, extents) -> Tensor:
    return _rows(View.from_address(address), extents)


def _tensor(view: View, extents: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[s, b, h, d]."""
    strides = (view.seq_stride, view.batch_stride, view.head_stride, 1)
    return _memory(view.data, extents, strides, dtype)


def _rows(view: View, extents: tuple[int, ...]) -> Tensor:
    """[b, h, s]."""
    num, batch, heads, _ = extents
    strides = (view.batch_stride, view.head_stride, view.seq_stride)
    return _memory(view.data, (batch, heads, num), strides, torch.float32)


def _memory(address: int | None, shape, strides, dtype: torch.dtype) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    assert address, "a tensor at address 0"
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    block = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(block, dtype=dtype).as_strided(shape, strides)
