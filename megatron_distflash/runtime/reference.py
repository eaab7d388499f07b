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
from megatron_distflash.runtime.kernel import (
    BackwardBlock,
    Band,
    BlockKernel,
    ForwardBlock,
    Rows,
    State,
)
from megatron_distflash.runtime.state import (
    add,
    cast,
    delta_of,
    rounded,
    state_dtype,
    store,
    uninitialised_state,
    zero_sums,
)
from megatron_distflash.runtime.writes import Write, Writes, writes_of

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
    """A tensor as it travels, contiguous: [tokens, b, heads, d], or [b, heads, tokens] per row."""

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
    walk = _Forward(plan, rank, transport, scale, kernel)
    walk.own = {Payload.QUERY: (q,), Payload.KEY_VALUE: (k, v)}
    walk.begin(q)
    walk.run()
    return walk.finished()


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
    walk = _Backward(plan, rank, transport, scale, kernel)
    walk.own = {
        Payload.QUERY_GRAD: (q, dout, lse, delta_of(out, dout)),
        Payload.KEY_VALUE: (k, v),
    }
    walk.out = out
    walk.begin(q, k, v)
    walk.run()
    return walk.finished(q.dtype)


@dataclass(frozen=True, slots=True)
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
        steps = self.plan.steps[self.rank]
        launches = [self._launches(step.tasks) for step in steps]  # may refuse: nothing has moved
        for step_idx, step in enumerate(steps):
            sends = [(transfer, self._outgoing(transfer)) for transfer in step.sends]
            receives = [(transfer, self._incoming(transfer)) for transfer in step.receives]
            with torch.profiler.record_function(f"distflash step {step_idx} post"):
                self.transport.post(step_idx, sends, receives)
            for arrived in step.merges:
                content = self.slots.pop((arrived.payload, arrived.slot))
                self.fold(step_idx, arrived, content.tensors)
            for kernel, tasks in launches[step_idx]:
                label = " ".join(map(_label, tasks))
                with torch.profiler.record_function(f"distflash step {step_idx} {label}"):
                    self.compute(kernel, step_idx, tasks)
            self.transport.wait()

    def compute(self, kernel: BlockKernel, step_idx: int, tasks: list[Task]) -> None:
        """Tasks that one call of the kernel takes."""
        raise NotImplementedError

    def fold(self, step_idx: int, arrived: Merge, result: tuple[Tensor, ...]) -> None:
        """Add a received result to the state of the rank's own rows."""
        raise NotImplementedError

    def _launches(self, tasks: tuple[Task, ...]) -> list[tuple[BlockKernel, list[Task]]]:
        """A step's tasks, those of one kernel together, as far as one call may take them."""
        launches: list[tuple[BlockKernel, list[Task]]] = []
        q = self.own[Payload.KEY_VALUE][0]  # the same device, dtype and head dim
        for task in tasks:
            kernel = choose_for(self.plan, task, self.kernel, q)
            if launches and launches[-1][0] is kernel and self.joins(launches[-1][1], task):
                continue
            launches.append((kernel, [task]))
        return launches

    def joins(self, tasks: list[Task], task: Task) -> bool:
        """Whether the call that takes ``tasks`` may take one more, which is then among them."""
        tasks.append(task)
        return True

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

    def writes(self, payload: Payload) -> Writes:
        return writes_of(self.plan, self.rank, payload)

    def fill(self, task: Task, payload: Payload, result: tuple[Tensor, ...]) -> None:
        """Put a task's result into the slot that its output names, or keep it as the rank's own."""
        output = _output(task, payload)
        if output.slot is None:
            if self.writes(payload).alone:
                self.state[payload] = result
            return
        content = _Content(result, result_tokens(task, output), task.heads)
        self.slots[payload, output.slot] = content

    @property
    def _layout(self) -> Layout:
        return self.plan.layout

    def _cut(self, payload: Payload, tensors, rows: Span, heads: Span) -> tuple[Tensor, ...]:
        group = self.plan.heads_per_kv_head
        factors = [group if width == "q" else 1 for width in _WIDTHS[payload]]
        pairs = zip(tensors, factors, strict=True)
        return tuple(_piece(tensor, rows, heads, factor) for tensor, factor in pairs)

    # -- transfers ------------------------------------------------------------------------------

    def _outgoing(self, transfer: Transfer) -> list[Tensor]:
        tensors = self.view(transfer.payload, transfer.source_slot, transfer.tokens, transfer.heads)
        wires = self._wires(transfer)
        return [
            _wired(x).to(wire.dtype).contiguous() for x, wire in zip(tensors, wires, strict=True)
        ]

    def _incoming(self, transfer: Transfer) -> list[Tensor]:
        device = self.own[Payload.KEY_VALUE][0].device
        tensors = self.transport.targets(transfer, self._wires(transfer), device)
        content = _Content(tuple(map(_unwired, tensors)), transfer.tokens, transfer.heads)
        self.slots[transfer.payload, transfer.target_slot] = content
        return tensors

    def _wires(self, transfer: Transfer) -> list[Wire]:
        _, batch, _, head_dim = self.own[Payload.KEY_VALUE][0].shape
        return wires_of(self.plan, transfer, batch, head_dim, self.own[Payload.KEY_VALUE][0].dtype)


class _Forward(_Walk):
    """The state of the own rows: (running output, LSE); ``out`` takes what is final."""

    out: Tensor

    def begin(self, q: Tensor) -> None:
        writes = self.writes(Payload.PARTIAL)
        self.out = torch.empty(0)
        if writes.alone:
            return  # the kernel makes the results
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.state[Payload.PARTIAL] = uninitialised_state(q)
        for tokens, heads in writes.unset:
            out, lse = self.view(Payload.PARTIAL, None, tokens, heads)
            out.zero_(), lse.fill_(-torch.inf)

    def finished(self) -> tuple[Tensor, Tensor]:
        acc, lse = self.state[Payload.PARTIAL]
        writes = self.writes(Payload.PARTIAL)
        if writes.alone:
            return acc.to(self.own[Payload.QUERY][0].dtype), lse
        for tokens, heads in writes.unfinished:
            view, _ = self.view(Payload.PARTIAL, None, tokens, heads)
            cast(self._out_view(tokens, heads), view)
        return self.out, lse

    def joins(self, tasks: list[Task], task: Task) -> bool:
        """Tasks on the same rows stand together; others must have no row in common."""
        place = self._place(task)
        same = [idx for idx, other in enumerate(tasks) if self._place(other) == place]
        if any(_overlap(self._place(t), place) for i, t in enumerate(tasks) if i not in same):
            return False
        tasks.insert(same[-1] + 1 if same else len(tasks), task)
        return True

    def compute(self, kernel, step_idx, tasks) -> None:
        blocks = []
        for task in tasks:
            q, k, v = self.inputs(task, Payload.QUERY)
            into = self._into(step_idx, task, q)
            blocks.append(ForwardBlock(q, k, v, task_band(self.plan, task), into))
        for task, result in zip(tasks, kernel.forward(blocks, self.scale), strict=True):
            self.fill(task, Payload.PARTIAL, result)

    def fold(self, step_idx, arrived, result) -> None:
        write = self.writes(Payload.PARTIAL).of[step_idx, arrived]
        store(self._own_state(write, arrived.tokens, arrived.heads), *result)

    def _into(self, step_idx: int, task: Task, q: Tensor) -> State | None:
        writes, slot = self.writes(Payload.PARTIAL), _output(task, Payload.PARTIAL).slot
        write = writes.of[step_idx, task]
        if writes.alone if slot is None else write.first and write.last:
            return None
        if slot is None:
            return self._own_state(write, task.queries, task.heads)
        if write.first:
            self.fill(task, Payload.PARTIAL, uninitialised_state(q))
        acc, lse = self.slots[Payload.PARTIAL, slot].tensors
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if write.last else None
        return State(acc, lse, out, accumulate=not write.first)

    def _own_state(self, write: Write, tokens: Span, heads: Span) -> State:
        acc, lse = self.view(Payload.PARTIAL, None, tokens, heads)
        out = self._out_view(tokens, heads) if write.last else None
        return State(acc, lse, out, accumulate=not write.first)

    def _out_view(self, tokens: Span, heads: Span) -> Tensor:
        return self._cut(Payload.DQ, (self.out,), self._layout.local(tokens), heads)[0]

    def _place(self, task: Task) -> tuple[int | None, Span, Span]:
        return _output(task, Payload.PARTIAL).slot, task.queries, task.heads


class _Backward(_Walk):
    """The state of the own rows: sums of dq and of (dk, dv)."""

    out: Tensor  # of the rank's own rows

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for payload, tensors in ((Payload.DQ, (q,)), (Payload.DKV, (k, v))):
            if not self.writes(payload).alone:
                self.state[payload] = zero_sums(*tensors)

    def finished(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (rounded(x, dtype) for p in (Payload.DQ, Payload.DKV) for x in self.state[p])
        return dq, dk, dv

    def compute(self, kernel, step_idx, tasks) -> None:
        blocks = []
        for task in tasks:
            q, dout, lse, delta, k, v = self.inputs(task, Payload.QUERY_GRAD)
            rows = Rows(lse, delta, self._own_output(task))
            (dq,) = self._into(step_idx, task, Payload.DQ, q)
            dk, dv = self._into(step_idx, task, Payload.DKV, k, v)
            band = task_band(self.plan, task)
            blocks.append(BackwardBlock(q, k, v, dout, rows, band, (dq, dk, dv)))
        for task, grads in zip(tasks, kernel.backward(blocks, self.scale), strict=True):
            self.fill(task, Payload.DQ, grads[:1])
            self.fill(task, Payload.DKV, grads[1:])

    def fold(self, step_idx, arrived, result) -> None:
        into = self.view(arrived.payload, None, arrived.tokens, arrived.heads)
        for total, part in zip(into, result, strict=True):
            add(total, part)

    def _into(
        self, step_idx: int, task: Task, payload: Payload, *like: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The sums to add to; None where the kernel makes them."""
        writes, output = self.writes(payload), _output(task, payload)
        write = writes.of[step_idx, task]
        if writes.alone if output.slot is None else write.first and write.last:
            return (None,) * len(like)
        if output.slot is None:
            return self.view(payload, None, result_tokens(task, output), task.heads)
        if write.first:
            self.fill(task, payload, zero_sums(*like))
        return self.slots[payload, output.slot].tensors

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
        tokens = len(transfer.tokens)
        if _is_per_row(transfer.payload, idx):
            wires.append(Wire((batch, num_heads, tokens), state_dtype(dtype)))
        else:
            wires.append(Wire((tokens, batch, num_heads, head_dim), dtype))
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
    band, direction = task_band(plan, task), plan.direction.value
    return chosen(kernel, direction, q.dtype, q.device, q.shape[-1], band, rows, columns)


def _output(task: Task, payload: Payload) -> Output:
    return next(output for output in task.outputs if output.payload is payload)


def _piece(x: Tensor, rows: Span, heads: Span, factor: int) -> Tensor:
    """``x`` itself if that is all of it: a slice costs the host as much as the rest of a task."""
    first, stop = heads.start * factor, heads.stop * factor
    if rows.stop - rows.start != x.shape[0]:
        x = x[rows.start : rows.stop]
    return x if stop - first == x.shape[2] else x[:, :, first:stop]


def _overlap(a: tuple[int | None, Span, Span], b: tuple[int | None, Span, Span]) -> bool:
    """Whether two places (slot, tokens, heads) have a row in common."""
    spans = zip(a[1:], b[1:], strict=True)
    return a[0] == b[0] and all(len(one.intersect(other)) > 0 for one, other in spans)


def _wired(x: Tensor) -> Tensor:
    """In the order of dimensions that it travels in."""
    return x.permute(1, 2, 0) if x.dim() == 3 else x


def _unwired(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1) if x.dim() == 3 else x


def _is_per_row(payload: Payload, idx: int) -> bool:
    """Whether the payload's tensor is LSE or delta: one number a row and head."""
    return (payload is Payload.PARTIAL and idx == 1) or (payload is Payload.QUERY_GRAD and idx >= 2)


def _label(task: Task) -> str:
    # ASCII: the profiler writes "unknown" for other names
    return f"q{task.queries}/k{task.keys}/h{task.heads}"
