"""flash-attn-4's kernels for Hopper and Blackwell, where its package is installed.

Its public functions hide the backward that takes an LSE from elsewhere, so this calls the two
functions below them, as they are in version 4.0.0b36. Written against that interface and tested
with a stand-in for it; it has not yet run on a GPU, so ``auto`` takes it only where a table of
measurements names it.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron_distflash.runtime.kernel import Direction
from megatron_distflash.runtime.library_kernels import OneByOne, cuda_refusal, lse_heads_first

INSTALL = "pip install flash-attn-4==4.0.0b36"


class FlashAttention4(OneByOne):
    """Shapes and dtypes as in ``kernel``; compiles itself for each kind of block that it meets."""

    name = "fa4"

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
        refusal = cuda_refusal(q, largest_head_dim=128, capability=(9, 0))
        if refusal is None and shape == "band":
            return "it is not trusted with bands"
        return _load()[1] if refusal is None else refusal

    def _forward(self, q, k, v, scale, band):
        out, lse, *_ = _interface()._flash_attn_fwd(
            *(x.transpose(0, 1) for x in (q, k, v)),
            softmax_scale=scale,
            causal=band.right is not None,
            return_lse=True,
        )
        return out.transpose(0, 1), lse.permute(2, 0, 1)

    def _backward(self, dout, q, k, v, out, lse, scale, band):
        q, k, v, out, dout = (x.transpose(0, 1) for x in (q, k, v, out, dout))
        grads = _interface()._flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse_heads_first(lse),
            softmax_scale=scale,
            causal=band.right is not None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return tuple(grad.transpose(0, 1) for grad in grads[:3])


def _interface() -> ModuleType:
    module, reason = _load()
    assert module is not None, reason
    return module


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    """(the package's module, None), or (None, why there is none)."""
    try:
        from flash_attn.cute import interface
    except ImportError as error:
        return None, f"flash-attn-4 is not there ({error}; {INSTALL})"
    missing = [x for x in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(interface, x)]
    if missing:
        return None, f"this flash-attn-4 has no {' or '.join(missing)} ({INSTALL})"
    return interface, None
