"""What one rank's walk over a plan does, worked out once: which part of which tensor each task,
transfer and merge means, and which kernel computes what together. A call then only cuts tensors and
hands them on.

A *place* is where the walk keeps the tensors of one payload: its own, or a slot's. Shapes as in
``kernel``; tensors of a place:
    QUERY (q)  KEY_VALUE (k, v)  QUERY_GRAD (q, dout, lse, delta)
    PARTIAL (running output, lse)  DQ (dq)  DKV (dk, dv)
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_distflash.plan.plan import (
    Direction,
    Merge,
    Output,
    Payload,
    Plan,
    Step,
    Task,
    Transfer,
    result_tokens,
)
from megatron_distflash.plan.spans import Span
from megatron_distflash.runtime.blocks import chosen
from megatron_distflash.runtime.kernel import Band, BlockKernel
from megatron_distflash.runtime.library_kernels import must_be_deterministic
from megatron_distflash.runtime.state import state_dtype
from megatron_distflash.runtime.writes import Item, Region, Same, Write, writes_of

# How many heads each tensor of a payload has for one KV head: "q" its query heads, "kv" one.
_WIDTHS = {
    Payload.QUERY: ("q",),
    Payload.KEY_VALUE: ("kv", "kv"),
    Payload.PARTIAL: ("q", "q"),
    Payload.QUERY_GRAD: ("q", "q", "q", "q"),
    Payload.DQ: ("q",),
    Payload.DKV: ("kv", "kv"),
}

# The places of a rank's own tensors; slots have those behind.
OWN = {payload: place for place, payload in enumerate(Payload)}


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor as it travels, contiguous: [tokens, b, heads, d], or [b, heads, tokens] per row."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor [tokens, b, heads] or [tokens, b, heads, d], of ``shape``, that begins at
    token ``row`` and at ``head``."""

    row: int
    head: int
    shape: tuple[int, ...]

    def of(self, x: Tensor) -> Tensor:
        """In one call of torch's: each costs the host as much as all the rest here."""
        strides = x.stride()
        start = x.storage_offset() + self.row * strides[0] + self.head * strides[2]
        return x.as_strided(self.shape, strides, start)


@dataclass(frozen=True, slots=True)
class View:
    """A piece of each tensor of a place; ``pieces`` None: the tensors as they are."""

    place: int
    pieces: tuple[Piece, ...] | None

    def first_of(self, x: Tensor) -> Tensor:
        """The first piece, of a tensor like the first of the place."""
        return x if self.pieces is None else self.pieces[0].of(x)


@dataclass(frozen=True, slots=True)
class Send:
    transfer: Transfer
    view: View
    wires: list[Wire]


@dataclass(frozen=True, slots=True)
class Receive:
    transfer: Transfer
    place: int
    wires: list[Wire]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a result goes.

    Attributes:
        view: the state or sums of its rows.
        is_own: they are the rank's own, not a slot's.
        first: they hold nothing yet.
        last: nothing follows; a forward's result is then written in the output's dtype.
        is_made: the kernel makes the result's tensors, which take the place.
    """

    view: View
    is_own: bool
    first: bool
    last: bool
    is_made: bool


@dataclass(frozen=True, slots=True)
class Fold:
    """The result that has arrived in ``place`` is added to the target."""

    payload: Payload
    place: int
    target: Target


@dataclass(frozen=True, slots=True)
class Block:
    """A task.

    Attributes:
        queries: QUERY's tensors, or a backward's QUERY_GRAD's.
        keys: KEY_VALUE's.
        is_helped: queries are another rank's.
        targets: PARTIAL's, or a backward's DQ's and DKV's.
    """

    queries: View
    keys: View
    band: Band
    is_helped: bool
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Blocks that one call of a kernel takes. ``gives_way``: there are transfers beside it."""

    kernel: BlockKernel
    blocks: list[Block]
    label: str
    gives_way: bool


@dataclass(frozen=True, slots=True)
class StepProgram:
    sends: list[Send]
    receives: list[Receive]
    folds: list[Fold]
    launches: list[Launch]
    post_label: str


@dataclass(frozen=True, slots=True)
class Results:
    """The state of one payload of the rank's own rows; attributes as in ``Writes``."""

    unset: list[View]
    unfinished: list[View]
    alone: bool


@dataclass(frozen=True, slots=True)
class Program:
    """A rank's walk. ``results``: of PARTIAL, or of DQ and DKV."""

    steps: list[StepProgram]
    results: dict[Payload, Results]
    num_places: int


def program_of(plan: Plan, rank: int, kernel: str, k: Tensor) -> Program:
    """Remembered by all that it depends on; tensors' strides are not among it.

    Args:
        kernel: a name from ``blocks.KERNELS``.
        k: [n, b, g, d], the rank's own.

    Raises:
        ValueError: no kernel computes one of the tasks.
    """
    _, batch, _, head_dim = k.shape
    kind = batch, head_dim, k.dtype, k.device
    return _program(Same(plan), rank, kernel, *kind, must_be_deterministic())


@lru_cache(maxsize=64)
def _program(same: Same, rank, kernel, batch, head_dim, dtype, device, _deterministic) -> Program:
    like = torch.empty(0, batch, 0, head_dim, dtype=dtype, device=device)
    return _Compiler(same.plan, rank, kernel, like).program()


class _Compiler:
    """Replays a rank's steps; ``_contents`` says what the slots hold at the time."""

    def __init__(self, plan: Plan, rank: int, kernel: str, like: Tensor) -> None:
        self.plan, self.rank = plan, rank
        self.kernel, self.like = kernel, like
        self._places: dict[tuple[Payload, int], int] = {}
        everything = Span(0, plan.layout.rank_tokens(rank)), Span(0, plan.num_kv_heads)
        self._contents: dict[int, Region] = dict.fromkeys(OWN.values(), everything)

    def program(self) -> Program:
        is_forward = self.plan.direction is Direction.FORWARD
        payloads = [Payload.PARTIAL] if is_forward else [Payload.DQ, Payload.DKV]
        steps = [self._step(*item) for item in enumerate(self.plan.steps[self.rank])]
        results = {payload: self._results(payload) for payload in payloads}
        return Program(steps, results, len(OWN) + len(self._places))

    def _step(self, step_idx: int, step: Step) -> StepProgram:
        """In the order of the walk: what a step sends was there before it receives."""
        sends = [
            Send(x, self._view(x.payload, x.source_slot, x.tokens, x.heads), self._wires(x))
            for x in step.sends
        ]
        receives = [self._receive(transfer) for transfer in step.receives]
        folds = [self._fold(step_idx, arrived) for arrived in step.merges]
        launches = [
            self._launch(step_idx, kernel, tasks)
            for kernel, tasks in _launches(self.plan, step.tasks, self.kernel, self.like)
        ]
        return StepProgram(sends, receives, folds, launches, f"distflash step {step_idx} post")

    def _receive(self, transfer: Transfer) -> Receive:
        place = self._fill(transfer.payload, transfer.target_slot, transfer.tokens, transfer.heads)
        return Receive(transfer, place, self._wires(transfer))

    def _fold(self, step_idx: int, arrived: Merge) -> Fold:
        view = self._view(arrived.payload, None, arrived.tokens, arrived.heads)
        write = self._write(step_idx, arrived, arrived.payload)
        target = Target(view, True, write.first, write.last, is_made=False)
        return Fold(arrived.payload, self._places[arrived.payload, arrived.slot], target)

    def _launch(self, step_idx: int, kernel: BlockKernel, tasks: list[Task]) -> Launch:
        blocks = [self._block(step_idx, task) for task in tasks]
        # ASCII: the profiler writes "unknown" for other names
        names = " ".join(f"q{task.queries}/k{task.keys}/h{task.heads}" for task in tasks)
        label = f"distflash step {step_idx} {names}"
        return Launch(kernel, blocks, label, gives_way=self.plan.num_ranks > 1)

    def _block(self, step_idx: int, task: Task) -> Block:
        is_forward = self.plan.direction is Direction.FORWARD
        query = Payload.QUERY if is_forward else Payload.QUERY_GRAD
        return Block(
            self._view(query, task.query_slot, task.queries, task.heads),
            self._view(Payload.KEY_VALUE, task.key_value_slot, task.keys, task.heads),
            task_band(self.plan, task),
            task.query_slot is not None,
            tuple(self._target(step_idx, task, output) for output in task.outputs),
        )

    def _target(self, step_idx: int, task: Task, output: Output) -> Target:
        write, tokens = self._write(step_idx, task, output.payload), result_tokens(task, output)
        if output.slot is not None:
            place = self._fill(output.payload, output.slot, tokens, task.heads)
            is_made = write.first and write.last
            return Target(View(place, None), False, write.first, write.last, is_made)
        view = self._view(output.payload, None, tokens, task.heads)
        is_made = writes_of(self.plan, self.rank, output.payload).alone
        return Target(view, True, write.first, write.last, is_made)

    def _write(self, step_idx: int, item: Item, payload: Payload) -> Write:
        return writes_of(self.plan, self.rank, payload).of[step_idx, item]

    def _results(self, payload: Payload) -> Results:
        writes = writes_of(self.plan, self.rank, payload)
        unset, unfinished = (
            [self._view(payload, None, *region) for region in regions]
            for regions in (writes.unset, writes.unfinished)
        )
        return Results(unset, unfinished, writes.alone)

    # -- places ---------------------------------------------------------------------------------

    def _fill(self, payload: Payload, slot: int, tokens: Span, heads: Span) -> int:
        """A slot's place, which holds this from now on."""
        place = self._places.setdefault((payload, slot), len(OWN) + len(self._places))
        self._contents[place] = tokens, heads
        return place

    def _view(self, payload: Payload, slot: int | None, tokens: Span, heads: Span) -> View:
        """The payload's tensors for ``tokens`` and ``heads``, the rank's own or a slot's."""
        place = OWN[payload] if slot is None else self._places[payload, slot]
        held_tokens, held_heads = self._contents[place]
        rows = self.plan.layout.local(tokens) if slot is None else _within(tokens, held_tokens)
        columns = _within(heads, held_heads)
        if (len(rows), len(columns)) == (len(held_tokens), len(held_heads)):
            return View(place, None)
        return View(place, tuple(self._pieces(payload, rows, columns)))

    def _pieces(self, payload: Payload, rows: Span, heads: Span):
        _, batch, _, head_dim = self.like.shape
        for idx, width in enumerate(_WIDTHS[payload]):
            factor = self.plan.heads_per_kv_head if width == "q" else 1
            shape = (len(rows), batch, len(heads) * factor, head_dim)
            shape = shape[:3] if _is_per_row(payload, idx) else shape
            yield Piece(rows.start, heads.start * factor, shape)

    def _wires(self, transfer: Transfer) -> list[Wire]:
        _, batch, _, head_dim = self.like.shape
        return wires_of(self.plan, transfer, batch, head_dim, self.like.dtype)


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


def _launches(
    plan: Plan, tasks: tuple[Task, ...], kernel: str, like: Tensor
) -> list[tuple[BlockKernel, list[Task]]]:
    """A step's tasks, those of one kernel together, as far as one call may take them."""
    joins = _joins_rows if plan.direction is Direction.FORWARD else _joins
    launches: list[tuple[BlockKernel, list[Task]]] = []
    for task in tasks:
        chosen_kernel = choose_for(plan, task, kernel, like)
        if launches and launches[-1][0] is chosen_kernel and joins(launches[-1][1], task):
            continue
        launches.append((chosen_kernel, [task]))
    return launches


def _joins(tasks: list[Task], task: Task) -> bool:
    """Whether the call that takes ``tasks`` may take one more, which is then among them."""
    tasks.append(task)
    return True


def _joins_rows(tasks: list[Task], task: Task) -> bool:
    """Likewise in a forward: tasks on the same rows stand together; others must have no row in
    common."""
    rows, place = _rows_of(task), len(tasks)
    for idx, other in enumerate(map(_rows_of, tasks)):
        if other == rows:
            place = idx + 1
        elif _overlap(other, rows):
            return False
    tasks.insert(place, task)
    return True


_Rows = tuple[int | None, int, int, int, int]  # slot, tokens from and to, KV heads from and to


def _rows_of(task: Task) -> _Rows:
    """What a forward's task writes to. Numbers: a document mask has many tasks to compare."""
    tokens, heads = task.queries, task.heads
    return task.outputs[0].slot, tokens.start, tokens.stop, heads.start, heads.stop


def _overlap(a: _Rows, b: _Rows) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4]


def _within(span: Span, held: Span) -> Span:
    return Span(span.start - held.start, span.stop - held.start)


def _is_per_row(payload: Payload, idx: int) -> bool:
    """Whether the payload's tensor is LSE or delta: one number a row and head."""
    return (payload is Payload.PARTIAL and idx == 1) or (payload is Payload.QUERY_GRAD and idx >= 2)
