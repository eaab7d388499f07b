"""The running state of attention and the few sums around it. Shapes as in ``blocks``."""

import torch
from torch import Tensor


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that outputs, LSE and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that have seen no key: out 0, lse -inf."""
    dtype = state_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)


def merge(out: Tensor, lse: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
    """Add a partial to the state (out, lse) in place.

    ``lse' = logaddexp(lse, partial_lse)``, and each output weighs ``exp(its lse - lse')``. Safe at
    any gap; rows that neither side has seen a key for stay (0, -inf).
    """
    total = torch.logaddexp(lse, partial_lse)
    pivot = torch.where(total == -torch.inf, torch.zeros_like(total), total)
    out.mul_((lse - pivot).exp_().unsqueeze(-1))
    out.addcmul_(partial.to(out.dtype), (partial_lse - pivot).exp_().unsqueeze(-1))
    lse.copy_(total)


def delta_of(out: Tensor, dout: Tensor) -> Tensor:
    """delta = rowsum(out * dout), [n, b, h] in the state's dtype."""
    dtype = state_dtype(dout.dtype)
    return (out.to(dtype) * dout.to(dtype)).sum(-1)


def stand_in_output(dout: Tensor, delta: Tensor) -> Tensor:
    """An output whose rowsum with ``dout`` is ``delta``: dout * delta / |dout|².

    Library kernels want the output only to form delta from it. A helper gets delta (one number a
    row) instead of the output (d numbers), and rebuilds the shortest output that gives it. In 16
    bits delta suffers less from this output's rounding than from the true one's: all its terms have
    one sign, none cancel.
    """
    square = delta_of(dout, dout)
    ratio = torch.where(square > 0, delta / square, torch.zeros_like(delta))
    return (dout.to(delta.dtype) * ratio.unsqueeze(-1)).to(dout.dtype)
