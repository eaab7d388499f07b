"""Native communication: the transfers of a plan on streams of their own, by the C++ module (cpp/).

The walk over the plan, the block kernels and the order of the merges are the reference executor's;
only its transport is another. So results are the same bits.

A plan is flattened once per shape: slots that receive get fixed places in one allocation, the
workspace, whose size the plan bounds. After that every call hands over pointers only, and the host
never waits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_distflash.plan.plan import Payload, Plan, Step, Transfer
from megatron_distflash.plan.validate import describe
from megatron_distflash.runtime.reference import Wire, wires_of

_ALIGNMENT_BYTES = 256
_NOT_STAGED = -1


def module() -> ModuleType:
    """The C++ module. RuntimeError if this installation has none."""
    try:
        from megatron_distflash.runtime import _native
    except ImportError as error:
        raise RuntimeError(
            f"megatron-distflash was built without its native module ({error}): install it where "
            "g++ and pybind11 are found, or use --distflash-comm torch."
        ) from error
    return _native


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
FlatTransfer = tuple[int, bool, int, str, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class FlatPlan:
    """One rank's transfers as the C++ module takes them.

    Attributes:
        transfers: (step, is send, peer, name, parts).
        workspace_bytes: slots, and behind them what a one-sided transport stages in one step.
        waits: [step] the step whose group has to be there before the next step; None: none.
    """

    transfers: list[FlatTransfer]
    workspace_bytes: int
    waits: list[int | None]


def flatten(plan: Plan, rank: int, shape: Shape, *, staged: bool) -> FlatPlan:
    """``staged``: sources copy what they send into their workspaces, where targets fetch it."""
    slots, slots_bytes = _place_slots(plan, rank, shape)
    flat, staged_bytes = [], 0
    for step_idx, step in enumerate(plan.steps[rank]):
        places = _place_staged(plan, rank, step_idx, shape) if staged else {}
        for transfer in step.sends:
            parts = places.get(transfer, [_NOT_STAGED] * len(shape.wires(plan, transfer)))
            sizes = _sizes(plan, transfer, shape)
            rows = [(size, place, 0) for size, place in zip(sizes, parts, strict=True)]
            flat.append((step_idx, True, transfer.target, describe(transfer), rows))
            staged_bytes = max(staged_bytes, *(p + s for s, p, _ in rows), slots_bytes)
        for transfer in step.receives:
            rows = _receive_rows(plan, step_idx, transfer, shape, slots, staged)
            flat.append((step_idx, False, transfer.source, describe(transfer), rows))
    return FlatPlan(flat, max(slots_bytes, staged_bytes), _waits(plan.steps[rank]))


def _receive_rows(plan, step_idx, transfer, shape, slots, staged) -> list[tuple[int, int, int]]:
    sizes = _sizes(plan, transfer, shape)
    sources = [0] * len(sizes)
    if staged:
        sources = _place_staged(plan, transfer.source, step_idx, shape)[transfer]
    start = slots[transfer.payload, transfer.target_slot]
    return list(zip(sizes, _offsets(sizes, start)[0], sources, strict=True))


def _sizes(plan: Plan, transfer: Transfer, shape: Shape) -> list[int]:
    wires = shape.wires(plan, transfer)
    return [math.prod(wire.shape) * wire.dtype.itemsize for wire in wires]


def _offsets(sizes: list[int], start: int) -> tuple[list[int], int]:
    """Aligned places one after the other, and where they end."""
    places = []
    for size in sizes:
        places.append(start)
        start += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, start


def _place_slots(plan: Plan, rank: int, shape: Shape) -> tuple[dict[tuple[Payload, int], int], int]:
    """Where each slot that receives begins, and where the last one ends."""
    needed: dict[tuple[Payload, int], int] = {}
    for step in plan.steps[rank]:
        for transfer in step.receives:
            key = (transfer.payload, transfer.target_slot)
            size = _offsets(_sizes(plan, transfer, shape), 0)[1]
            needed[key] = max(needed.get(key, 0), size)
    places, end = _offsets(list(needed.values()), 0)
    return dict(zip(needed, places, strict=True)), end


def _place_staged(plan: Plan, rank: int, step_idx: int, shape: Shape) -> dict[Transfer, list[int]]:
    """Where a step's sends are staged. Steps share the place: a group ends when all is fetched."""
    end = _place_slots(plan, rank, shape)[1]
    places = {}
    for transfer in plan.steps[rank][step_idx].sends:
        places[transfer], end = _offsets(_sizes(plan, transfer, shape), end)
    return places


def _waits(steps: tuple[Step, ...]) -> list[int | None]:
    """A rank waits for what its next step reads, and not for more: what it only sent, or needs
    later, may still be on its way."""
    arrives: dict[tuple[Payload, int], int] = {}
    waits: list[int | None] = []
    waited = -1
    for step_idx, step in enumerate(steps):
        for transfer in step.receives:
            arrives[transfer.payload, transfer.target_slot] = step_idx
        needed = max([arrives[read] for read in _reads(steps, step_idx + 1)], default=-1)
        waits.append(needed if needed > waited else None)
        waited = max(waited, needed)
    return waits


def _reads(steps: tuple[Step, ...], step_idx: int) -> set[tuple[Payload, int]]:
    """The received slots that a step merges or computes from."""
    if step_idx == len(steps):
        return set()
    found = {(merge.payload, merge.slot) for merge in steps[step_idx].merges}
    for task in steps[step_idx].tasks:
        inputs = [output.payload for output in task.outputs]
        query = Payload.QUERY if Payload.PARTIAL in inputs else Payload.QUERY_GRAD
        found.add((query, task.query_slot))
        found.add((Payload.KEY_VALUE, task.key_value_slot))
    return {(payload, slot) for payload, slot in found if slot is not None}


class NativeTransport:
    """The reference executor's ``Transport`` for one plan and shape, on a C++ executor."""

    def __init__(
        self,
        communicator: Any,
        plan: Plan,
        shape: Shape,
        device: torch.device,
        exchange: Callable[[bytes], list[bytes]],
    ) -> None:
        """``exchange(own) -> everybody's``, in rank order; only one-sided transports need it."""
        rank = communicator.rank
        self._flat = flatten(plan, rank, shape, staged=communicator.is_one_sided)
        self._slots = _place_slots(plan, rank, shape)[0]
        self._device, self._num_steps = device, plan.num_steps
        name = f"{plan.schedule} {plan.direction}"
        workspace_bytes, transfers = self._flat.workspace_bytes, self._flat.transfers
        self._executor = module().Executor(
            communicator, name, plan.num_steps, workspace_bytes, transfers
        )
        self._one_sided = communicator.is_one_sided
        if self._one_sided:
            self._executor.import_workspaces(exchange(self._executor.export_workspace()))
        self._workspace = _bytes_at(self._executor.workspace, workspace_bytes, device)
        self._targets: dict[Transfer, list[Tensor]] = {}
        self._held: dict[int, list[Tensor]] = {}
        self._step_idx = -1

    @property
    def workspace_bytes(self) -> int:
        return self._flat.workspace_bytes

    def targets(self, transfer: Transfer, wires: list[Wire], device: torch.device) -> list[Tensor]:
        if transfer not in self._targets:
            sizes = [math.prod(wire.shape) * wire.dtype.itemsize for wire in wires]
            places = _offsets(sizes, self._slots[transfer.payload, transfer.target_slot])[0]
            self._targets[transfer] = [
                self._workspace[place : place + size].view(wire.dtype).view(wire.shape)
                for place, size, wire in zip(places, sizes, wires, strict=True)
            ]
        return self._targets[transfer]

    def post(self, step_idx, sends, receives) -> None:
        stream = self._stream()
        if step_idx == 0:
            self._held.clear()
            self._executor.begin(stream)
        tensors = [tensor for _, tensors in sends for tensor in tensors]
        self._executor.post(step_idx, [tensor.data_ptr() for tensor in tensors], stream)
        self._step_idx = step_idx
        if tensors:
            self._held[step_idx] = tensors

    def wait(self) -> None:
        step_idx = self._step_idx
        if step_idx == self._num_steps - 1:
            self._executor.finish(self._stream())
            self._held.clear()
        elif (needed := self._flat.waits[step_idx]) is not None:
            self._executor.wait(needed, self._stream())
            self._held = {step: held for step, held in self._held.items() if step > needed}

    def close(self, barrier: Callable[[], None] | None) -> None:
        """Give the workspace back. ``barrier`` joins the ranks; None: some of them are lost."""
        self._targets.clear()
        if self._one_sided:
            self._executor.unmap_workspaces()
            if barrier is not None:
                barrier()  # memory must outlive its mappings
        self._executor.close()

    def _stream(self) -> int:
        """The current stream's handle; 0, the calling thread, on the CPU."""
        if self._device.type == "cpu":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream


class _CudaBytes:
    """Device memory as numba, cupy and torch take it from each other."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Memory that is not torch's as a uint8 tensor [num_bytes]."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, num_bytes), device=device)
