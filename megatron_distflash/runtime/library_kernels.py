"""Block kernels that torch brings; shapes as in ``kernel``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_distflash.runtime.kernel import BackwardBlock, Band, Direction, ForwardBlock
from megatron_distflash.runtime.state import add, heads_first, stand_in_output, state_dtype, store

_aten = torch.ops.aten


class OneByOne:
    """A kernel that computes one block a call and overwrites its outputs: states and sums are
    updated by passes of their own. Subclasses have ``_forward`` and ``_backward`` of one block."""

    def forward(
        self, blocks: Sequence[ForwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        return [self._forward_into(block, scale) for block in blocks]

    def backward(
        self, blocks: Sequence[BackwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [self._backward_into(block, scale) for block in blocks]

    def _forward_into(self, block: ForwardBlock, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = self._forward(block.q, block.k, block.v, scale, block.band)
        state = block.into
        if state is None:
            return out, lse
        store(state, out, lse)
        return state.result, state.lse

    def _backward_into(self, block: BackwardBlock, scale: float) -> tuple[Tensor, ...]:
        dout, rows = block.dout, block.rows
        out = stand_in_output(dout, rows.delta) if rows.out is None else rows.out
        inputs = dout, block.q, block.k, block.v, out, rows.lse
        grads = self._backward(*inputs, scale, block.band)
        for grad, total in zip(grads, block.into, strict=True):
            if total is not None:
                add(total, grad)
        pairs = zip(grads, block.into, strict=True)
        return tuple(grad if total is None else total for grad, total in pairs)


class Cpu(OneByOne):
    """torch's CPU flash kernel; computes 16-bit inputs in float32, which is no slower there."""

    name = "cpu"

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
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
            dout, q, k, v, out, lse_heads_first(lse), 0.0, causal, attn_mask=mask, scale=scale
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


class Cudnn(OneByOne):
    """cuDNN through torch."""

    name = "cudnn"

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
        refusal = cuda_refusal(q, largest_head_dim=128)
        if refusal is None and shape == "band":
            return "it cannot mask a band"
        if refusal is None and direction == "backward" and must_be_deterministic():
            return "its gradients differ from run to run, which deterministic algorithms may not"
        return refusal

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
            lse_heads_first(lse).unsqueeze(-1),
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


class Flash(OneByOne):
    """FlashAttention 2 as built into torch; the only library kernel here that masks bands."""

    name = "flash"

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
        return cuda_refusal(q, largest_head_dim=256)

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
            lse_heads_first(lse),
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


def must_be_deterministic() -> bool:
    """Whether torch is told to refuse what differs from run to run."""
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return torch.are_deterministic_algorithms_enabled()


def cuda_refusal(
    q: Tensor, largest_head_dim: int, capability: tuple[int, int] = (8, 0)
) -> str | None:
    """What library kernels for GPUs refuse alike."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return "it takes bf16 and fp16 CUDA tensors only"
    if q.shape[-1] % 8 or q.shape[-1] > largest_head_dim:
        return f"it takes head dims up to {largest_head_dim} that are multiples of 8"
    if torch.cuda.get_device_capability(q.device) < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}"
    return None


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)


def lse_heads_first(lse: Tensor) -> Tensor:
    """[b, h, n], contiguous."""
    return heads_first(lse).contiguous()
