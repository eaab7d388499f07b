"""What stands in for transfers where a benchmark moves nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_distflash.plan import Payload
from megatron_distflash.runtime.program import Wire

_LSES = ((Payload.PARTIAL, 1), (Payload.QUERY_GRAD, 2))  # payload, its tensor


class Unmoved:
    """A transport that moves nothing: tasks compute on random tensors, another for each slot.

    Args:
        lse: about what an LSE is, so that probabilities are small numbers as in earnest.
    """

    def __init__(self, lse: float) -> None:
        self._lse = lse
        self._targets: dict[tuple, list[Tensor]] = {}

    def targets(self, transfer, wires, device) -> list[Tensor]:
        key = (transfer.payload, transfer.target_slot, tuple(wires))
        if key not in self._targets:
            self._targets[key] = [
                self._draw(transfer.payload, idx, wire, device) for idx, wire in enumerate(wires)
            ]
        return self._targets[key]

    def post(self, step_idx, sends, receives) -> None:
        pass

    def wait(self) -> None:
        pass

    def _draw(self, payload: Payload, idx: int, wire: Wire, device: torch.device) -> Tensor:
        noise = torch.randn(wire.shape, device=device)
        return (noise + self._lse if (payload, idx) in _LSES else noise).to(wire.dtype)
