"""The reference executor: walks a plan in Python, over any transport; readable first.

Every rank of the group calls ``forward`` (and later ``backward``) with the same plan and its own
local tensors; shapes as in ``kernel``, tokens in the order the plan's layout gives them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distflash.plan.plan import (
    Layout,
    Merge,
    Output,
    Payload,
    Plan,
    Task,
    Transfer,
    result_tokens,
)
from megatron_distflash.plan.spans import Span
from megatron_distflash.plan.validate import describe
from megatron_distflash.runtime.blocks import chosen
from megatron_distflash.runtime.kernel import Band, BlockKernel, Rows
from megatron_distflash.runtime.state import (
    delta_of,
    empty_state,
    merge,
    state_dtype,
)

# How many heads each tensor of a payload has for one KV head: "q" its query heads, "kv" one.
_WIDTHS = {
    Payload.QUERY: ("q",),
    Payload.KEY_VALUE: ("kv", "kv"),
    Payload.PARTIAL: ("q", "q"),
    Payload.QUERY_GRAD: ("q", "q", "q", "q"),
    Payload.DQ: ("q",),
    Payload.DKV: ("kv", "kv"),
}


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor as it travels, contiguous: [tokens, b, heads, d], or [tokens, b, heads] per row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Transport(Protocol):
    """Moves the transfers of one step. Calls alternate: post, wait, post, wait, …"""

    def targets(self, transfer: Transfer, wires: list[Wire], device: torch.device) -> list[Tensor]:
        """Contiguous tensors to receive the transfer into; valid until the slot is used again."""

    def post(
        self,
        step_idx: int,
        sends: list[tuple[Transfer, list[Tensor]]],
        receives: list[tuple[Transfer, list[Tensor]]],
    ) -> None:
        """Start a step's transfers as one group; tensors are contiguous and live until ``wait``."""

    def wait(self) -> None:
        """Make the received data visible to the current stream (or the host, for CPU tensors)."""


class TorchTransport:
    """torch.distributed point-to-point operations; any backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._held: list[Tensor] = []
        self._moving: tuple[int, list[Transfer]] = (0, [])

    def targets(self, transfer, wires, device) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype, device=device) for wire in wires]

    def post(self, step_idx, sends, receives) -> None:
        operations = [
            dist.P2POp(dist.isend, tensor, group=self._group, group_peer=transfer.target)
            for transfer, tensors in sends
            for tensor in tensors
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=transfer.source)
            for transfer, tensors in receives
            for tensor in tensors
        ]
        self._held = [operation.tensor for operation in operations]
        self._moving = step_idx, [transfer for transfer, _ in [*sends, *receives]]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            step_idx, transfers = self._moving
            moving = "; ".join(map(describe, transfers))
            raise RuntimeError(f"step {step_idx} did not move ({moving}): {error}") from error
        self._works, self._held = [], []


class NoTransport:
    """For one rank: there is nothing to move."""

    def targets(self, transfer, wires, device) -> list[Tensor]:
        raise AssertionError("one rank receives nothing")

    def post(self, step_idx, sends, receives) -> None:
        assert not sends and not receives

    def wait(self) -> None:
        pass


def forward(
    plan: Plan,
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    kernel: str,
    transport: Transport,
) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence for this rank's queries.

    Returns:
        out [n, b, h, d] in q's dtype, lse [n, b, h] in the state's.
    """
    state = empty_state(q)
    walk = _Forward(plan, rank, transport, scale, kernel)
    walk.own = {Payload.QUERY: (q,), Payload.KEY_VALUE: (k, v)}
    walk.state = {Payload.PARTIAL: state}
    walk.run()
    out, lse = state
    return out.to(q.dtype), lse


def backward(
    plan: Plan,
    rank: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    kernel: str,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for this rank's tokens, in q's dtype, by the backward plan."""
    dtype = state_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    walk = _Backward(plan, rank, transport, scale, kernel)
    walk.own = {
        Payload.QUERY_GRAD: (q, dout, lse, delta_of(out, dout)),
        Payload.KEY_VALUE: (k, v),
    }
    walk.out = out
    walk.state = {Payload.DQ: (dq,), Payload.DKV: (dk, dv)}
    walk.run()
    return tuple(grad.to(q.dtype) for grad in (dq, dk, dv))


@dataclass(slots=True)
class _Content:
    """What a slot holds: the payload's tensors for these tokens and heads."""

    tensors: tuple[Tensor, ...]
    tokens: Span
    heads: Span


class _Walk:
    """Walks a rank's steps; subclasses compute the tasks and fold in what arrives."""

    def __init__(
        self, plan: Plan, rank: int, transport: Transport, scale: float, kernel: str
    ) -> None:
        self.plan, self.rank, self.transport = plan, rank, transport
        self.scale, self.kernel = scale, kernel
        self.own: dict[Payload, tuple[Tensor, ...]] = {}
        self.state: dict[Payload, tuple[Tensor, ...]] = {}
        self.slots: dict[tuple[Payload, int], _Content] = {}

    def run(self) -> None:
        for step_idx, step in enumerate(self.plan.steps[self.rank]):
            sends = [(transfer, self._outgoing(transfer)) for transfer in step.sends]
            receives = [(transfer, self._incoming(transfer)) for transfer in step.receives]
            with torch.profiler.record_function(f"distflash step {step_idx} post"):
                self.transport.post(step_idx, sends, receives)
            for arrived in step.merges:
                self._merge(arrived)
            for task in step.tasks:
                with torch.profiler.record_function(f"distflash step {step_idx} {_label(task)}"):
                    self.compute(task)
            self.transport.wait()

    def compute(self, task: Task) -> None:
        raise NotImplementedError

    def fold(self, into: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
        """Add a received result to a state, in place."""
        raise NotImplementedError

    # -- tensors by name ------------------------------------------------------------------------

    def view(self, payload: Payload, slot: int | None, tokens: Span, heads: Span):
        """The payload's tensors for ``tokens`` and ``heads``, the rank's own or a slot's."""
        if slot is None:
            own = self.own.get(payload) or self.state[payload]
            return self._cut(payload, own, self._layout.local(tokens), heads)
        content = self.slots[payload, slot]
        start = content.tokens.start
        rows = Span(tokens.start - start, tokens.stop - start)
        columns = Span(heads.start - content.heads.start, heads.stop - content.heads.start)
        return self._cut(payload, content.tensors, rows, columns)

    def inputs(self, task: Task, query: Payload):
        """(query payload, key, value) of a task."""
        queries = self.view(query, task.query_slot, task.queries, task.heads)
        keys = self.view(Payload.KEY_VALUE, task.key_value_slot, task.keys, task.heads)
        return *queries, *keys

    def kernel_for(self, task: Task, q: Tensor) -> tuple[BlockKernel, Band]:
        return choose_for(self.plan, task, self.kernel, q), task_band(self.plan, task)

    def sum_of(self, task: Task, payload: Payload) -> tuple[Tensor, ...] | None:
        """What a task's result is to be added to; None: it is the first in its slot."""
        output = _output(task, payload)
        if output.slot is None:
            return self.view(payload, None, result_tokens(task, output), task.heads)
        if not output.accumulate:
            return None
        content = self.slots[payload, output.slot]
        content.tensors = tuple(x.to(state_dtype(x.dtype)) for x in content.tensors)
        return content.tensors

    def fill(self, task: Task, payload: Payload, result: tuple[Tensor, ...]) -> None:
        """Put a task's result into the slot that its output names."""
        output = _output(task, payload)
        content = _Content(result, result_tokens(task, output), task.heads)
        self.slots[payload, output.slot] = content

    @property
    def _layout(self) -> Layout:
        return self.plan.layout

    def _cut(self, payload: Payload, tensors, rows: Span, heads: Span) -> tuple[Tensor, ...]:
        group = self.plan.heads_per_kv_head
        factors = [group if width == "q" else 1 for width in _WIDTHS[payload]]
        return tuple(
            tensor[rows.start : rows.stop, :, heads.start * factor : heads.stop * factor]
            for tensor, factor in zip(tensors, factors, strict=True)
        )

    # -- transfers ------------------------------------------------------------------------------

    def _outgoing(self, transfer: Transfer) -> list[Tensor]:
        tensors = self.view(transfer.payload, transfer.source_slot, transfer.tokens, transfer.heads)
        wires = self._wires(transfer)
        return [x.to(wire.dtype).contiguous() for x, wire in zip(tensors, wires, strict=True)]

    def _incoming(self, transfer: Transfer) -> list[Tensor]:
        device = self.own[Payload.KEY_VALUE][0].device
        tensors = self.transport.targets(transfer, self._wires(transfer), device)
        content = _Content(tuple(tensors), transfer.tokens, transfer.heads)
        self.slots[transfer.payload, transfer.target_slot] = content
        return tensors

    def _wires(self, transfer: Transfer) -> list[Wire]:
        _, batch, _, head_dim = self.own[Payload.KEY_VALUE][0].shape
        return wires_of(self.plan, transfer, batch, head_dim, self.own[Payload.KEY_VALUE][0].dtype)

    def _merge(self, arrived: Merge) -> None:
        content = self.slots.pop((arrived.payload, arrived.slot))
        into = self.view(arrived.payload, None, arrived.tokens, arrived.heads)
        self.fold(into, content.tensors)


class _Forward(_Walk):
    def compute(self, task: Task) -> None:
        q, k, v = self.inputs(task, Payload.QUERY)
        kernel, band = self.kernel_for(task, q)
        state = self.sum_of(task, Payload.PARTIAL)
        result = kernel.forward(q, k, v, self.scale, band, state)
        if state is None:
            self.fill(task, Payload.PARTIAL, result)

    def fold(self, into, result) -> None:
        merge(*into, *result)


class _Backward(_Walk):
    out: Tensor  # of the rank's own rows

    def compute(self, task: Task) -> None:
        q, dout, lse, delta, k, v = self.inputs(task, Payload.QUERY_GRAD)
        kernel, band = self.kernel_for(task, q)
        rows = Rows(lse, delta, self._own_output(task))
        dq, dkv = self.sum_of(task, Payload.DQ), self.sum_of(task, Payload.DKV)
        into = (*(dq or (None,)), *(dkv or (None, None)))
        grads = kernel.backward(dout, q, k, v, rows, self.scale, band, into)
        if dq is None:
            self.fill(task, Payload.DQ, grads[:1])
        if dkv is None:
            self.fill(task, Payload.DKV, grads[1:])

    def fold(self, into, result) -> None:
        for total, part in zip(into, result, strict=True):
            total.add_(part)

    def _own_output(self, task: Task) -> Tensor | None:
        if task.query_slot is not None:
            return None
        (out,) = self._cut(Payload.DQ, (self.out,), self._layout.local(task.queries), task.heads)
        return out


def wires_of(
    plan: Plan, transfer: Transfer, batch: int, head_dim: int, dtype: torch.dtype
) -> list[Wire]:
    """The transfer's tensors. All travel in the input's dtype, except LSE and delta."""
    wires = []
    for idx, width in enumerate(_WIDTHS[transfer.payload]):
        num_heads = len(transfer.heads) * (plan.heads_per_kv_head if width == "q" else 1)
        rows = (len(transfer.tokens), batch, num_heads)
        per_row = _is_per_row(transfer.payload, idx)
        wires.append(Wire(rows, state_dtype(dtype)) if per_row else Wire((*rows, head_dim), dtype))
    return wires


def task_band(plan: Plan, task: Task) -> Band:
    """The task's band in the block's own row and column numbers."""
    left, right = plan.mask.band_of(task.kind)
    shift = task.queries.start - task.keys.start
    return Band(
        None if left is None else left - shift,
        None if right is None else right + shift,
    )


def choose_for(plan: Plan, task: Task, kernel: str, q: Tensor) -> BlockKernel:
    """The kernel that computes the task; ValueError if none can. ``q`` as in ``blocks.choose``."""
    rows, columns = len(task.queries), len(task.keys)
    band = task_band(plan, task)
    return chosen(kernel, q.dtype, q.device, q.shape[-1], band, rows, columns)


def _output(task: Task, payload: Payload) -> Output:
    return next(output for output in task.outputs if output.payload is payload)


def _is_per_row(payload: Payload, idx: int) -> bool:
    """Whether the payload's tensor is LSE or delta: one number a row and head."""
    return (payload is Payload.PARTIAL and idx == 1) or (payload is Payload.QUERY_GRAD and idx >= 2)


def _label(task: Task) -> str:
    return f"q{task.queries}·k{task.keys}·h{task.heads}"
