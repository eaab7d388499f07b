"""Block kernels that torch brings; shapes as in ``kernel``."""

import torch
from torch import Tensor

from megatron_distflash.runtime.kernel import Band
from megatron_distflash.runtime.state import merge, stand_in_output, state_dtype

_aten = torch.ops.aten


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


class Cpu(_Library):
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


class Cudnn(_Library):
    """cuDNN through torch."""

    name = "cudnn"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        refusal = _cuda_refusal(q, largest_head_dim=128)
        return "it cannot mask a band" if refusal is None and shape == "band" else refusal

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


class Flash(_Library):
    """FlashAttention 2 as built into torch; the only library kernel here that masks bands."""

    name = "flash"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        return _cuda_refusal(q, largest_head_dim=256)

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


def _cuda_refusal(q: Tensor, largest_head_dim: int) -> str | None:
    """What torch's CUDA kernels refuse alike."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return "it takes bf16 and fp16 CUDA tensors only"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"it takes head dims up to {largest_head_dim} that are multiples of 8"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def _lse_heads_first(lse: Tensor) -> Tensor:
    return lse.permute(1, 2, 0).contiguous()
