"""Block attention: one rectangle of queries × keys, on the kernels that torch brings.

Tensor shapes here and in the executors (n, m: tokens of the block; h: query heads; g: KV heads):
    q, out, dout, dq  [n, b, h, d]
    k, v, dk, dv      [m, b, g, d]
    lse, delta        [n, b, h], natural logarithm, in the state's dtype (float64 for float64, else
    float32)

A backend's backward gets the LSE over *all* keys of the sequence, not the block's own; so the
blocks' gradients simply add up to the whole gradient (FlashAttention, arXiv 2205.14135, algorithm
4, per block).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from megatron_distflash.runtime.state import merge, stand_in_output, state_dtype

KERNELS = ("auto", "cpu", "cudnn", "flash")

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Band:
    """Row i of a block sees column j when ``i - left <= j <= i + right``; None is no bound."""

    left: int | None = None
    right: int | None = None

    def shape(self, rows: int, columns: int) -> str:
        """``full``, ``causal`` (square, on the diagonal) or ``band``."""
        if self.left is None and self.right is None:
            return "full"
        return "causal" if self.left is None and self.right == 0 and rows == columns else "band"


@dataclass(frozen=True, slots=True)
class Rows:
    """What the backward knows of a block's rows, over all keys of the sequence.

    Attributes:
        out: None on a helper, which gets delta instead.
    """

    lse: Tensor
    delta: Tensor
    out: Tensor | None = None


class BlockKernel(Protocol):
    """A way to compute one block."""

    name: str

    def refusal(self, q: Tensor, shape: str) -> str | None:
        """Why it cannot compute such a block (one clause), or None."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        band: Band,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the block, out normalised.

        Args:
            into: a state (out, lse) of the same rows in the state's dtype, to be updated in place
                with the block and returned; None: fresh tensors, out in q's dtype or the state's.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        scale: float,
        band: Band,
        into: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the block.

        Args:
            into: sums in the state's dtype, each to be added to in place and returned; None: a
                fresh tensor, in q's dtype or the state's.
        """


class _Library:
    """A kernel that overwrites its outputs: states and sums are updated by a pass of their own."""

    def forward(self, q, k, v, scale, band, into=None):
        result = self._forward(q, k, v, scale, band)
        if into is None:
            return result
        merge(*into, *result)
        return into

    def backward(self, dout, q, k, v, rows, scale, band, into=(None, None, None)):
        out = stand_in_output(dout, rows.delta) if rows.out is None else rows.out
        grads = self._backward(dout, q, k, v, out, rows.lse, scale, band)
        pairs = zip(grads, into, strict=True)
        return tuple(grad if total is None else total.add_(grad) for grad, total in pairs)


def choose(kernel: str, q: Tensor, band: Band, rows: int, columns: int) -> BlockKernel:
    """The kernel for one block.

    Args:
        kernel: a name from ``KERNELS``; ``auto`` takes the first of cudnn, flash (cpu on CPU
            tensors) that can.
        q: any tensor with the queries' device, dtype and head dim.

    Raises:
        ValueError: an unknown name, or no kernel can compute the block; says why.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(KERNELS)}")
    names = [kernel] if kernel != "auto" else ["cudnn", "flash"] if q.is_cuda else ["cpu"]
    shape = band.shape(rows, columns)
    refusals = []
    for name in names:
        refusal = _KERNELS[name].refusal(q, shape)
        if refusal is None:
            return _KERNELS[name]
        refusals.append(f"{name}: {refusal}")
    kind = f"{q.dtype} on {q.device.type}, head dim {q.shape[-1]}, {shape} block"
    raise ValueError(
        f"no kernel for {kind} ({'; '.join(refusals)}); choose another --distflash-kernel"
    )


class _Cpu(_Library):
    """torch's CPU flash kernel; computes 16-bit inputs in float32, which is no slower there."""

    name = "cpu"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        return None if q.device.type == "cpu" else "it takes CPU tensors only"

    def _forward(self, q, k, v, scale, band):
        q, k, v = (_heads_first(x.to(state_dtype(x.dtype))) for x in (q, k, v))
        causal, mask = self._mask(q, k.shape[2], band)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return _tokens_first(out), lse.permute(2, 0, 1)

    def _backward(self, dout, q, k, v, out, lse, scale, band):
        dout, q, k, v, out = (_heads_first(x.to(lse.dtype)) for x in (dout, q, k, v, out))
        causal, mask = self._mask(q, k.shape[2], band)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, _lse_heads_first(lse), 0.0, causal, attn_mask=mask, scale=scale
        )
        return tuple(_tokens_first(grad) for grad in grads)

    @staticmethod
    def _mask(q: Tensor, columns: int, band: Band) -> tuple[bool, Tensor | None]:
        rows = q.shape[2]
        shape = band.shape(rows, columns)
        if shape != "band":
            return shape == "causal", None
        offset = torch.arange(columns)[None] - torch.arange(rows)[:, None]
        hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if band.right is not None:
            hidden |= offset > band.right
        if band.left is not None:
            hidden |= offset < -band.left
        return False, torch.zeros(rows, columns, dtype=q.dtype).masked_fill(hidden, -torch.inf)


class _Cudnn(_Library):
    """cuDNN through torch."""

    name = "cudnn"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bf16 and fp16 CUDA tensors only"
        if q.shape[-1] % 8 or q.shape[-1] > 128:
            return "it takes head dims up to 128 that are multiples of 8"
        if shape == "band":
            return "it cannot mask a band"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def _forward(self, q, k, v, scale, band):
        causal = band.right is not None
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, causal, scale=scale
        )
        rows, batch, heads, _ = q.shape
        return _tokens_first(out), lse.reshape(batch, heads, rows).permute(2, 0, 1)

    def _backward(self, dout, q, k, v, out, lse, scale, band):
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: never read
        rows, columns = q.shape[0], k.shape[0]
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_first(x) for x in (dout, q, k, v, out)),
            _lse_heads_first(lse).unsqueeze(-1),
            seed,
            seed,
            None,
            None,
            None,
            rows,
            columns,
            0.0,
            band.right is not None,
            scale=scale,
        )
        return tuple(_tokens_first(grad) for grad in grads)


class _Flash(_Library):
    """FlashAttention 2 as built into torch; the only library kernel here that masks bands."""

    name = "flash"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bf16 and fp16 CUDA tensors only"
        if q.shape[-1] % 8 or q.shape[-1] > 256:
            return "it takes head dims up to 256 that are multiples of 8"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def _forward(self, q, k, v, scale, band):
        rows, columns = q.shape[0], k.shape[0]
        out, lse, *_ = _aten._flash_attention_forward(
            *(x.transpose(0, 1) for x in (q, k, v)),
            None,
            None,
            rows,
            columns,
            0.0,
            band.shape(rows, columns) == "causal",
            False,
            scale=scale,
            **self._window(rows, columns, band),
        )
        return out.transpose(0, 1), lse.permute(2, 0, 1)

    def _backward(self, dout, q, k, v, out, lse, scale, band):
        rows, columns = q.shape[0], k.shape[0]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout: never read
        grads = _aten._flash_attention_backward(
            *(x.transpose(0, 1) for x in (dout, q, k, v, out)),
            _lse_heads_first(lse),
            None,
            None,
            rows,
            columns,
            0.0,
            band.shape(rows, columns) == "causal",
            state,
            state[:0],
            scale=scale,
            **self._window(rows, columns, band),
        )
        return tuple(grad.transpose(0, 1) for grad in grads)

    @staticmethod
    def _window(rows: int, columns: int, band: Band) -> dict[str, int]:
        """FlashAttention counts from the bottom right corner, where a tight block reaches >= 0."""
        if band.shape(rows, columns) != "band":
            return {}
        shift = columns - rows
        left = -1 if band.left is None else band.left + shift
        right = -1 if band.right is None else band.right - shift
        return {"window_size_left": left, "window_size_right": right}


_KERNELS: dict[str, BlockKernel] = {"cpu": _Cpu(), "cudnn": _Cudnn(), "flash": _Flash()}


@lru_cache(maxsize=4096)
def chosen(
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    band: Band,
    rows: int,
    columns: int,
) -> BlockKernel:
    """``choose``, remembered by what it depends on."""
    return choose(kernel, torch.empty(0, head_dim, dtype=dtype, device=device), band, rows, columns)


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def _lse_heads_first(lse: Tensor) -> Tensor:
    return lse.permute(1, 2, 0).contiguous()
