"""A plan as the C++ module takes it: one rank's transfers as numbers.

Slots that receive get fixed places in one allocation, the workspace, whose size the plan bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distflash.plan.plan import Payload, Plan, Transfer
from megatron_distflash.plan.timing import needs
from megatron_distflash.plan.validate import describe
from megatron_distflash.runtime.program import Wire, wires_of

_ALIGNMENT_BYTES = 256
_NOT_STAGED = -1


@dataclass(frozen=True, slots=True)
class Shape:
    """What, besides the plan, decides how large transfers are."""

    batch: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, k: Tensor) -> Shape:
        """``k`` [n, b, g, d]."""
        return cls(k.shape[1], k.shape[3], k.dtype)

    def wires(self, plan: Plan, transfer: Transfer) -> list[Wire]:
        return wires_of(plan, transfer, self.batch, self.head_dim, self.dtype)


# A part: (bytes, offset in this rank's workspace, offset in the source's workspace)
FlatTransfer = tuple[int, int, bool, int, str, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class FlatPlan:
    """One rank's transfers as the C++ module takes them.

    Attributes:
        transfers: (step, first step in which the target reads it, is send, peer, name, parts).
        workspace_bytes: slots, and behind them what a one-sided transport stages in one step.
    """

    transfers: list[FlatTransfer]
    workspace_bytes: int


def flatten(plan: Plan, rank: int, shape: Shape, *, staged: bool) -> FlatPlan:
    """``staged``: sources copy what they send into their workspaces, where targets fetch it."""
    slots, slots_bytes = place_slots(plan, rank, shape)
    needed = needs(plan)
    flat, staged_bytes = [], 0
    for step_idx, step in enumerate(plan.steps[rank]):
        places = _place_staged(plan, rank, step_idx, shape) if staged else {}
        for transfer in step.sends:
            parts = places.get(transfer, [_NOT_STAGED] * len(shape.wires(plan, transfer)))
            sizes = _sizes(plan, transfer, shape)
            rows = [(size, place, 0) for size, place in zip(sizes, parts, strict=True)]
            ends = (step_idx, needed[step_idx, transfer], True, transfer.target)
            flat.append((*ends, describe(transfer), rows))
            if staged:
                staged_bytes = max(staged_bytes, *(place + size for size, place, _ in rows))
        for transfer in step.receives:
            rows = _receive_rows(plan, step_idx, transfer, shape, slots, staged)
            ends = (step_idx, needed[step_idx, transfer], False, transfer.source)
            flat.append((*ends, describe(transfer), rows))
    return FlatPlan(flat, max(slots_bytes, staged_bytes))


def _receive_rows(plan, step_idx, transfer, shape, slots, staged) -> list[tuple[int, int, int]]:
    sizes = _sizes(plan, transfer, shape)
    sources = [0] * len(sizes)
    if staged:
        sources = _place_staged(plan, transfer.source, step_idx, shape)[transfer]
    start = slots[transfer.payload, transfer.target_slot]
    return list(zip(sizes, offsets(sizes, start)[0], sources, strict=True))


def _sizes(plan: Plan, transfer: Transfer, shape: Shape) -> list[int]:
    return [num_bytes(wire) for wire in shape.wires(plan, transfer)]


def num_bytes(wire: Wire) -> int:
    return math.prod(wire.shape) * wire.dtype.itemsize


def offsets(sizes: list[int], start: int) -> tuple[list[int], int]:
    """Aligned places one after the other, and where they end."""
    places = []
    for size in sizes:
        places.append(start)
        start += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, start


def place_slots(plan: Plan, rank: int, shape: Shape) -> tuple[dict[tuple[Payload, int], int], int]:
    """Where each slot that receives begins, and where the last one ends."""
    needed: dict[tuple[Payload, int], int] = {}
    for step in plan.steps[rank]:
        for transfer in step.receives:
            key = (transfer.payload, transfer.target_slot)
            size = offsets(_sizes(plan, transfer, shape), 0)[1]
            needed[key] = max(needed.get(key, 0), size)
    places, end = offsets(list(needed.values()), 0)
    return dict(zip(needed, places, strict=True)), end


def _place_staged(plan: Plan, rank: int, step_idx: int, shape: Shape) -> dict[Transfer, list[int]]:
    """Where a step's sends are staged. Steps share the place: a group ends when all is fetched."""
    end = place_slots(plan, rank, shape)[1]
    places = {}
    for transfer in plan.steps[rank][step_idx].sends:
        places[transfer], end = offsets(_sizes(plan, transfer, shape), end)
    return places
