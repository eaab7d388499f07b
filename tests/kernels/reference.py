"""Float64 attention with masks and several key segments, for checking the kernels."""

import math

import torch
from torch import Tensor

from megatron_distflash.runtime.cuda_tasks import LAYOUTS, Mask


def visible(mask: Mask, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: which keys each query sees."""
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None]
    if mask.kind == "full":
        return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    seen = j <= i + mask.offset
    return seen & (j > i + mask.offset - mask.window) if mask.kind == "window" else seen


def to_bhsd(x: Tensor, layout: str) -> Tensor:
    return x.permute(*LAYOUTS[layout], 3)


def from_bhsd(x: Tensor, layout: str) -> Tensor:
    order = (*LAYOUTS[layout], 3)
    return x.permute(*(order.index(dim) for dim in range(4)))


def attention(
    q: Tensor,
    segments: list[tuple[Tensor, Tensor, Mask]],
    scale: float,
    layout: str = "sbhd",
) -> tuple[Tensor, Tensor]:
    """(out in the layout, lse [b, h, s]), float64 and differentiable; rows that see no key are zero
    with LSE -inf."""
    q = to_bhsd(q, layout).double()
    scores, values = [], []
    for k, v, mask in segments:
        k, v = (to_bhsd(x, layout).double() for x in (k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = visible(mask, q.shape[2], k.shape[2], q.device)
        scores.append((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf))
        values.append(v)
    score, value = torch.cat(scores, dim=-1), torch.cat(values, dim=2)
    lse = torch.logsumexp(score, dim=-1)
    base = torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))
    probabilities = torch.exp(score - base[..., None])
    return from_bhsd(probabilities @ value, layout), lse


def error(x: Tensor, reference: Tensor) -> float:
    """Relative error in norm; NaN if x holds any, absolute where the reference is zero."""
    norm = reference.double().norm().item()
    return ((x.double() - reference.double()).norm() / (norm or 1.0)).item()
