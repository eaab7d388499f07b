"""States that tests begin with."""

import torch
from torch import Tensor

from megatron_distflash.runtime.state import uninitialised_state


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that have seen no key: out 0, lse -inf."""
    out, lse = uninitialised_state(q)
    return out.zero_(), lse.fill_(-torch.inf)
