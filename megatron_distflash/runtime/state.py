"""The running state of attention and the few sums around it. Shapes as in ``kernel``.

On GPUs that our own row kernels run on, each sum is one pass over memory; elsewhere the same sums
are a few of torch's operations.
"""

import torch
from torch import Tensor

from megatron_distflash.runtime import cuda_kernels
from megatron_distflash.runtime.kernel import State


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that outputs, LSE and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_rows(q: Tensor) -> Tensor:
    """One number for each row and head of ``q``, uninitialised: [n, b, h] over [b, h, n] in memory,
    which kernels read fastest."""
    n, b, h, _ = q.shape
    return q.new_empty((b, h, n), dtype=state_dtype(q.dtype)).permute(2, 0, 1)


def uninitialised_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that are written before they are read."""
    return q.new_empty(q.shape, dtype=state_dtype(q.dtype)), empty_rows(q)


def zero_sums(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros of each tensor's shape in the state's dtype."""
    return tuple(x.new_zeros(x.shape, dtype=state_dtype(x.dtype)) for x in tensors)


def store(state: State, partial: Tensor, partial_lse: Tensor) -> None:
    """Add a partial to the state, and write ``state.out`` if it is given."""
    if not state.accumulate:
        state.result.copy_(partial)
        state.lse.copy_(partial_lse)
        return
    acc, lse, out = state.acc, state.lse, state.out
    assert acc is not None
    one_pass = out is not None and out.dtype == partial.dtype and out.itemsize == 2
    kernels = _row_kernels(acc, partial, out) if one_pass else None
    if kernels is not None:
        kernels.merge(acc, heads_first(lse), partial, heads_first(partial_lse), out=out)
        return
    merge(acc, lse, partial, partial_lse)
    if out is not None:
        cast(out, acc)


def merge(out: Tensor, lse: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
    """Add a partial to the state (out, lse) in place.

    ``lse' = logaddexp(lse, partial_lse)``, and the partial weighs ``exp(partial_lse - lse')``, a
    sigmoid of the LSEs' difference: as good where LSEs are large. Safe at any gap; rows that
    neither side has seen a key for stay (0, -inf).
    """
    kernels = _row_kernels(out, partial)
    if kernels is not None:
        kernels.merge(out, heads_first(lse), partial, heads_first(partial_lse))
        return
    weight = torch.sigmoid(partial_lse - lse)
    weight.masked_fill_(partial_lse == -torch.inf, 0)  # -inf - -inf is nan
    out.lerp_(partial.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, partial_lse))


def add(total: Tensor, part: Tensor) -> None:
    """total, in the state's dtype, += part."""
    kernels = _row_kernels(total, part)
    if kernels is None:
        total.add_(part)
    else:
        kernels.accumulate(total, part)


def cast(out: Tensor, acc: Tensor) -> None:
    """out <- acc, rounded to out's dtype."""
    kernels = _row_kernels(out, acc) if out.itemsize == 2 and acc.itemsize == 4 else None
    if kernels is None:
        out.copy_(acc)
    else:
        kernels.cast(out, acc)


def rounded(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """acc in ``dtype``: itself if it is."""
    if acc.dtype is dtype:
        return acc
    out = acc.new_empty(acc.shape, dtype=dtype)
    cast(out, acc)
    return out


def delta_of(out: Tensor, dout: Tensor) -> Tensor:
    """delta = rowsum(out * dout), [n, b, h] in the state's dtype."""
    delta = empty_rows(dout)
    kernels = _row_kernels(out, dout) if out.dtype == dout.dtype else None
    if kernels is not None:
        kernels.delta(out, dout, heads_first(delta))
        return delta
    return torch.sum(out.to(delta.dtype) * dout.to(delta.dtype), -1, out=delta)


def heads_first(rows: Tensor) -> Tensor:
    """[n, b, h] as our kernels name it: [b, h, n]."""
    return rows.permute(1, 2, 0)


def _row_kernels(*tensors: Tensor) -> cuda_kernels.CudaKernels | None:
    """Our fused kernels, where they are built and can take the tensors."""
    if not all(x.is_cuda and _row_kernels_take(x) for x in tensors):
        return None
    return cuda_kernels.load()[0]


def _row_kernels_take(x: Tensor) -> bool:
    """``x``: a CUDA tensor."""
    head_dim = x.shape[-1]
    if x.dtype is torch.float64 or head_dim % 8 or head_dim > 256 or x.data_ptr() % 16:
        return False
    units = 16 // x.itemsize
    return not any(stride % units for stride in x.stride()[:-1])


def stand_in_output(dout: Tensor, delta: Tensor) -> Tensor:
    """An output whose rowsum with ``dout`` is ``delta``: dout * delta / |dout|².

    Library kernels want the output only to form delta from it. A helper gets delta (one number a
    row) instead of the output (d numbers), and rebuilds the shortest output that gives it. In 16
    bits delta suffers less from this output's rounding than from the true one's: all its terms have
    one sign, none cancel.
    """
    kernels = _row_kernels(dout)
    if kernels is not None:
        out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
        kernels.stand_in(dout, heads_first(delta), out)
        return out
    dout_wide = dout.to(delta.dtype)
    largest = dout_wide.abs().amax(-1, keepdim=True)  # its square may under- or overflow
    unit = dout_wide / torch.where(largest > 0, largest, torch.ones_like(largest))
    square = unit.square().sum(-1, keepdim=True)
    ratio = delta.unsqueeze(-1) / largest / square
    return (unit * torch.where(largest > 0, ratio, torch.zeros_like(ratio))).to(dout.dtype)
