"""What crosses to our CUDA kernels: tasks of tensors, and the C structures that they become once
they are checked.

Shapes: b batch, h query heads, g KV heads (h is a multiple of g), s sequence, d head dimension.
Tensors come in one of the layouts of ``LAYOUTS`` with any strides but a contiguous d; LSE and
delta are always [b, h, s] fp32, of any strides. LSE is the natural logarithm.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = {"sbhd": (1, 2, 0), "bshd": (0, 2, 1), "bhsd": (0, 1, 2)}  # dims of batch, head, seq
HEAD_DIMS = (64, 96, 128, 192, 256)
MASKS = {"full": 0, "causal": 1, "window": 2}
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class View(ctypes.Structure):
    """distflash_tensor and distflash_rows of kernels/api.h: pointer and strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("seq_stride", ctypes.c_int64),
    ]


class BlockStructure(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("q_len", ctypes.c_int32),
        ("k_len", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("window", ctypes.c_int64),
    ]


class ForwardStructure(ctypes.Structure):
    _fields_ = [
        ("block", BlockStructure),
        ("q", View),
        ("k", View),
        ("v", View),
        ("out_acc", View),
        ("out", View),
        ("lse", View),
        ("accumulate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class BackwardStructure(ctypes.Structure):
    _fields_ = [
        ("block", BlockStructure),
        ("q", View),
        ("k", View),
        ("v", View),
        ("dout", View),
        ("lse", View),
        ("delta", View),
        ("dq", View),
        ("dk", View),
        ("dv", View),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("softmax_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("tiles_per_shift", ctypes.c_int32),
    ]


class Shape(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("seq", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees; i and j count from the task's first query and key.

    ``full``: all. ``causal``: j <= i + offset, where offset is the position of query 0 minus the
    position of key 0. ``window``: causal, and j > i + offset - window.
    """

    kind: str = "full"
    offset: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in MASKS:
            raise ValueError(f"mask kind {self.kind!r} is unknown; use one of {tuple(MASKS)}")
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"a window of {self.window} keys; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ForwardTask:
    """One attention block whose result is merged into its queries' state.

    q [s, b, h, d], k and v [s_k, b, g, d] (in the call's layout), bf16 or fp16; out_acc like q in
    fp32; lse [b, h, s] fp32. With ``accumulate`` the state (out_acc, lse) is read and updated, else
    overwritten. With ``out`` (like q, same dtype) the merged result is written there in 16 bit and
    not to out_acc, which may then be None unless ``accumulate``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    out_acc: Tensor | None = None
    out: Tensor | None = None
    mask: Mask = Mask()
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class BackwardTask:
    """One attention block's share of the gradients, added to fp32 dq, dk and dv.

    Shapes as in ForwardTask; dout like q in its dtype; lse and delta [b, h, s] fp32 are those of
    the whole attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    mask: Mask = Mask()


def check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != like.device:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape} on {like.device}, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )


def view_of(name: str, x: Tensor | None, dims: tuple[int, int, int]) -> View:
    if x is None:
        return View()
    if x.dim() == 4 and x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, got {x.stride()}")
    batch, head, seq = dims
    return View(x.data_ptr(), x.stride(batch), x.stride(head), x.stride(seq))


def rows_of(x: Tensor) -> View:
    return View(x.data_ptr(), *x.stride())


def dims_of(layout: str) -> tuple[int, int, int]:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {tuple(LAYOUTS)}")
    return LAYOUTS[layout]


def block_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, dims: tuple[int, int, int]
) -> BlockStructure:
    """The block's extents; raises ValueError unless q, k and v fit together."""
    batch, head, seq = dims
    if q.dim() != 4 or k.dim() != 4 or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q must be 4-dimensional bf16 or fp16, got {q.dtype} {tuple(q.shape)}")
    expected = list(k.shape)
    expected[batch], expected[3] = q.shape[batch], q.shape[3]
    check("k", k, tuple(expected), q.dtype, q)
    check("v", v, tuple(expected), q.dtype, q)
    q_heads, kv_heads = q.shape[head], k.shape[head]
    if q_heads % max(kv_heads, 1) or (kv_heads == 0 and q_heads):
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    return BlockStructure(
        q.shape[batch],
        q_heads,
        kv_heads,
        q.shape[seq],
        k.shape[seq],
        MASKS[mask.kind],
        mask.offset,
        mask.window,
    )


def forward_structure(task: ForwardTask, dims: tuple[int, int, int]) -> ForwardStructure:
    q = task.q
    block = block_of(q, task.k, task.v, task.mask, dims)
    check("lse", task.lse, (block.batch, block.q_heads, block.q_len), torch.float32, q)
    if task.out_acc is not None:
        check("out_acc", task.out_acc, tuple(q.shape), torch.float32, q)
    elif task.out is None or task.accumulate:
        raise ValueError("out_acc may be None only with out and without accumulate")
    if task.out is not None:
        check("out", task.out, tuple(q.shape), q.dtype, q)
    return ForwardStructure(
        block,
        view_of("q", q, dims),
        view_of("k", task.k, dims),
        view_of("v", task.v, dims),
        view_of("out_acc", task.out_acc, dims),
        view_of("out", task.out, dims),
        rows_of(task.lse),
        int(task.accumulate),
    )


def backward_structure(task: BackwardTask, dims: tuple[int, int, int]) -> BackwardStructure:
    q = task.q
    block = block_of(q, task.k, task.v, task.mask, dims)
    rows = (block.batch, block.q_heads, block.q_len)
    check("dout", task.dout, tuple(q.shape), q.dtype, q)
    check("lse", task.lse, rows, torch.float32, q)
    check("delta", task.delta, rows, torch.float32, q)
    check("dq", task.dq, tuple(q.shape), torch.float32, q)
    check("dk", task.dk, tuple(task.k.shape), torch.float32, q)
    check("dv", task.dv, tuple(task.k.shape), torch.float32, q)
    return BackwardStructure(
        block,
        *(view_of(name, getattr(task, name), dims) for name in ("q", "k", "v", "dout")),
        rows_of(task.lse),
        rows_of(task.delta),
        *(view_of(name, getattr(task, name), dims) for name in ("dq", "dk", "dv")),
    )


def shape_of(x: Tensor, dims: tuple[int, int, int]) -> Shape:
    if x.dim() != 4:
        raise ValueError(f"expected 4 dimensions, got shape {tuple(x.shape)}")
    batch, head, seq = dims
    return Shape(x.shape[batch], x.shape[head], x.shape[seq], x.shape[3])
