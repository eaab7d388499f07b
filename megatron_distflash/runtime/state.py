"""The running state of attention and the few sums around it. Shapes as in ``kernel``."""

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

    ``lse' = logaddexp(lse, partial_lse)``, and the partial weighs ``exp(partial_lse - lse')``, a
    sigmoid of the LSEs' difference: as good where LSEs are large. Safe at any gap; rows that
    neither side has seen a key for stay (0, -inf).
    """
    weight = torch.sigmoid(partial_lse - lse)
    weight.masked_fill_(partial_lse == -torch.inf, 0)  # -inf - -inf is nan
    out.lerp_(partial.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, partial_lse))


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
    dout_wide = dout.to(delta.dtype)
    largest = dout_wide.abs().amax(-1, keepdim=True)  # its square may under- or overflow
    unit = dout_wide / torch.where(largest > 0, largest, torch.ones_like(largest))
    square = unit.square().sum(-1, keepdim=True)
    ratio = delta.unsqueeze(-1) / largest / square
    return (unit * torch.where(largest > 0, ratio, torch.zeros_like(ratio))).to(dout.dtype)
