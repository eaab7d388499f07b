"""Proofs that a plan is right, whoever built it. ``validate`` raises PlanError at the first broken
promise.

1. Every attending (query, key, head) triple is computed exactly once, and no masked one costs a
   task.
2. The two sides of every transfer exist, in the same order per pair of ranks, in the same step.
3. Data arrives before it is used, and no slot is reused before its last reader is done.
4. Nothing is sent that nobody uses, and every result gets home exactly once.
5. The slots of one payload never hold more than ``MAX_LIVE_CHUNKS`` chunks on any rank.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NoReturn

from megatron_distflash.plan.grid import format_grid
from megatron_distflash.plan.masks import Mask, MaskKind, band_pairs
from megatron_distflash.plan.plan import (
    Direction,
    Output,
    Payload,
    Plan,
    PlanError,
    Task,
    Transfer,
    result_tokens,
)
from megatron_distflash.plan.spans import Span, union

# What transfers that take two steps can need at most: a band or packed documents may give each of
# the four pairs of half chunks in a zigzag step a dKV over other tokens, 2 chunks; they live for
# two steps where they are computed, and for three where they come home.
MAX_LIVE_CHUNKS = 10


def validate(plan: Plan) -> None:
    """Prove the five promises above.

    Raises:
        PlanError: names the rank, the step and the culprit, and shows the plan's grid.
    """
    _check_shape(plan)
    _check_coverage(plan)
    _check_pairing(plan)
    for rank in range(plan.num_ranks):
        _RankReplay(plan, rank).run()
    _check_buffers(plan)


def _fail(plan: Plan, message: str, rank: int | None = None, step: int | None = None) -> NoReturn:
    where = (
        "" if rank is None else f" on rank {rank}" + ("" if step is None else f" in step {step}")
    )
    grid = format_grid(plan, mark=(rank, step), only_rank=rank if plan.num_ranks > 16 else None)
    raise PlanError(f"{plan.schedule} {plan.direction} plan{where}: {message}\n{grid}")


def _check_shape(plan: Plan) -> None:
    layout = plan.layout
    end = 0
    for chunk in layout.chunks:
        if chunk.tokens.start != end or chunk.tokens.stop < end:
            raise PlanError(
                f"the layout's chunks must follow each other: {chunk.tokens} after token {end}"
            )
        end = chunk.tokens.stop
    if not end:
        raise PlanError("the layout holds no tokens")
    documents = plan.mask.documents
    if documents and documents[-1] != end:
        raise PlanError(f"the last document ends at token {documents[-1]}, the sequence at {end}")
    if layout.num_ranks != plan.num_ranks:
        raise PlanError(f"the layout has {layout.num_ranks} ranks, the plan {plan.num_ranks}")
    if len({len(steps) for steps in plan.steps}) != 1:
        raise PlanError("every rank must have the same number of steps")
    if plan.num_kv_heads < 1 or plan.num_heads % plan.num_kv_heads:
        raise PlanError(
            f"{plan.num_heads} query heads cannot share {plan.num_kv_heads} KV heads evenly"
        )


def _owner(plan: Plan, tokens: Span, rank: int, step_idx: int) -> int:
    try:
        return plan.layout.owner(tokens)
    except PlanError as error:
        _fail(plan, str(error), rank, step_idx)


def _tasks(plan: Plan):
    for rank, steps in enumerate(plan.steps):
        for step_idx, step in enumerate(steps):
            for task in step.tasks:
                yield rank, step_idx, task


# ---- 1. coverage --------------------------------------------------------------------------


def _check_coverage(plan: Plan) -> None:
    """Cut queries, keys and heads at every boundary; each cell must be covered as its mask says."""
    for rank, step_idx, task in _tasks(plan):
        _check_tight(plan, rank, step_idx, task)
    cells = _Cells.of(plan)
    covers: dict[tuple[Span, Span, Span], list[tuple[int, int, Task]]] = defaultdict(list)
    for rank, step_idx, task in _tasks(plan):
        for cell in cells.inside(task):
            covers[cell].append((rank, step_idx, task))
    for cell in cells.attending(plan.mask):
        found = covers.pop(cell, [])
        queries, keys, heads = cell
        if len(found) != 1:
            rank, step_idx = found[-1][:2] if found else (plan.layout.owner(queries), None)
            times = "never" if not found else f"{len(found)} times"
            triple = f"queries {queries} × keys {keys} × heads {heads}"
            _fail(plan, f"{triple} are computed {times}, not once", rank, step_idx)
        rank, step_idx, task = found[0]
        if not _same_pairs(plan.mask, task.kind, queries, keys):
            _fail(plan, f"mask kind {task.kind} is wrong for {queries} × {keys}", rank, step_idx)
    for (queries, keys, _heads), found in covers.items():
        rank, step_idx, task = found[0]
        if band_pairs(queries, keys, *plan.mask.band_of(task.kind)):
            _fail(plan, f"computes masked pairs {queries} × {keys}", rank, step_idx)


def _check_tight(plan: Plan, rank: int, step_idx: int, task: Task) -> None:
    """Every row and column has an attending pair (bands are contiguous: the ends suffice)."""
    if not (len(task.queries) and len(task.keys) and len(task.heads)):
        _fail(
            plan, f"task {task.queries} × {task.keys} × heads {task.heads} is empty", rank, step_idx
        )
    for tokens in (task.queries, task.keys):
        _owner(plan, tokens, rank, step_idx)
    if not Span(0, plan.num_kv_heads).contains(task.heads):
        _fail(plan, f"KV heads {task.heads} do not exist", rank, step_idx)
    ends = lambda span: {Span(span.start, span.start + 1), Span(span.stop - 1, span.stop)}  # noqa: E731
    rows = [(row, task.keys) for row in ends(task.queries)]
    columns = [(task.queries, column) for column in ends(task.keys)]
    for queries, keys in rows + columns:
        if not plan.mask.pairs(queries, keys):
            _fail(plan, f"nothing attends in {queries} × {keys} of a task", rank, step_idx)


@dataclass(frozen=True, slots=True)
class _Cells:
    queries: list[Span]
    keys: list[Span]
    heads: list[Span]

    @classmethod
    def of(cls, plan: Plan) -> "_Cells":
        tasks = [task for _, _, task in _tasks(plan)]
        fixed = [chunk.tokens for chunk in plan.layout.chunks]
        fixed += [
            Span(a, b) for a, b in zip(plan.mask.documents, plan.mask.documents[1:], strict=False)
        ]
        return cls(
            _pieces([*fixed, *(task.queries for task in tasks)]),
            _pieces([*fixed, *(task.keys for task in tasks)]),
            _pieces([Span(0, plan.num_kv_heads), *(task.heads for task in tasks)]),
        )

    def inside(self, task: Task):
        for queries in _within(self.queries, task.queries):
            for keys in _within(self.keys, task.keys):
                for heads in _within(self.heads, task.heads):
                    yield queries, keys, heads

    def attending(self, mask: Mask):
        for queries in self.queries:
            for keys in self.keys:
                if mask.pairs(queries, keys):
                    for heads in self.heads:
                        yield queries, keys, heads


def _pieces(spans: list[Span]) -> list[Span]:
    cuts = sorted({end for span in spans for end in (span.start, span.stop)})
    return [Span(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def _within(pieces: list[Span], span: Span) -> list[Span]:
    """The pieces of ``span``, whose ends are among theirs."""
    first = bisect_left(pieces, span.start, key=lambda piece: piece.start)
    return pieces[first : bisect_left(pieces, span.stop, key=lambda piece: piece.start)]


def _same_pairs(mask: Mask, kind: MaskKind, queries: Span, keys: Span) -> bool:
    """Whether the kind's band and the mask select the same pairs of a cell."""
    wanted, computed = (mask.left, mask.right), mask.band_of(kind)
    both = [
        min((r for r in reach if r is not None), default=None)
        for reach in zip(wanted, computed, strict=True)
    ]
    counts = {band_pairs(queries, keys, *band) for band in (wanted, computed, tuple(both))}
    return len(counts) == 1


# ---- 2. transfers have two sides ----------------------------------------------------------


def _check_pairing(plan: Plan) -> None:
    for step_idx in range(plan.num_steps):
        sent, received = defaultdict(list), defaultdict(list)
        for rank in range(plan.num_ranks):
            step = plan.steps[rank][step_idx]
            for transfer in step.sends:
                if transfer.source != rank:
                    _fail(
                        plan,
                        f"sends {describe(transfer)}, which is rank {transfer.source}'s",
                        rank,
                        step_idx,
                    )
                sent[rank, transfer.target].append(transfer)
            for transfer in step.receives:
                if transfer.target != rank:
                    _fail(
                        plan,
                        f"receives {describe(transfer)}, which is rank {transfer.target}'s",
                        rank,
                        step_idx,
                    )
                received[transfer.source, rank].append(transfer)
        for source, target in sent.keys() | received.keys():
            ours, theirs = sent[source, target], received[source, target]
            if source == target:
                _fail(plan, f"sends {describe((ours + theirs)[0])} to itself", source, step_idx)
            if ours != theirs:
                odd = next(
                    (
                        a or b
                        for a, b in zip(ours + [None], theirs + [None], strict=False)
                        if a != b
                    ),
                    (ours + theirs)[-1],
                )
                text = f"the two sides disagree about {describe(odd)} (missing or out of order)"
                _fail(plan, text, source, step_idx)


def describe(transfer: Transfer) -> str:
    """A transfer in words, for messages and traces."""
    ends = f"rank {transfer.source} to rank {transfer.target}"
    return f"{transfer.payload} of tokens {transfer.tokens}, KV heads {transfer.heads}, {ends}"


# ---- 3. and 4. what lies in the slots -----------------------------------------------------


@dataclass(slots=True)
class _Content:
    tokens: Span
    heads: Span
    ready: int  # first step that may read it
    received: bool
    last_use: int
    read: list[tuple[Span, Span]] = field(default_factory=list)  # (tokens, heads) of every use
    delivered: int = 0  # times merged (received results) or sent (produced results)

    def __str__(self) -> str:
        return f"tokens {self.tokens}, KV heads {self.heads}"

    def is_used_whole(self) -> bool:
        """Whether the uses together cover all tokens of all heads."""
        pieces = _pieces([self.heads, *(heads for _, heads in self.read)])
        return bool(pieces) and all(
            union(tokens for tokens, heads in self.read if heads.contains(piece)) == [self.tokens]
            for piece in pieces
        )


class _RankReplay:
    """Walks one rank's steps and keeps what each slot holds."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.step = plan, rank, 0
        self.slots: dict[tuple[Payload, int], _Content] = {}

    def run(self) -> None:
        for step_idx, step in enumerate(self.plan.steps[self.rank]):
            self.step = step_idx
            for transfer in step.sends:
                self._send(transfer)
            for transfer in step.receives:
                self._receive(transfer)
            for merge in step.merges:
                self._merge(merge)
            for task in step.tasks:
                self._compute(task)
        for payload, slot in list(self.slots):
            self._retire(payload, slot)

    def _fail(self, message: str) -> NoReturn:
        _fail(self.plan, message, self.rank, self.step)

    def _owns(self, tokens: Span) -> bool:
        return _owner(self.plan, tokens, self.rank, self.step) == self.rank

    def _send(self, transfer: Transfer) -> None:
        if transfer.source_slot is None:
            if transfer.payload.is_result or not self._owns(transfer.tokens):
                self._fail(f"has no {describe(transfer)} of its own to send")
            return
        content = self._content(
            transfer.payload, transfer.source_slot, f"sends {describe(transfer)}"
        )
        if content.received or (content.tokens, content.heads) != (transfer.tokens, transfer.heads):
            self._fail(f"slot {transfer.source_slot} does not hold the result {describe(transfer)}")
        content.delivered += 1
        content.last_use = self.step

    def _receive(self, transfer: Transfer) -> None:
        self._occupy(transfer.payload, transfer.target_slot)
        content = _Content(transfer.tokens, transfer.heads, self.step + 1, True, self.step)
        self.slots[transfer.payload, transfer.target_slot] = content

    def _merge(self, merge) -> None:
        what = f"merges {merge.payload} of tokens {merge.tokens}, KV heads {merge.heads}"
        if not merge.payload.is_result or not self._owns(merge.tokens):
            self._fail(f"{what}, which it does not own")
        content = self._content(merge.payload, merge.slot, what)
        if not content.received or (content.tokens, content.heads) != (merge.tokens, merge.heads):
            self._fail(f"{what}, but slot {merge.slot} holds {content}")
        content.delivered += 1
        content.read.append((merge.tokens, merge.heads))
        content.last_use = self.step

    def _compute(self, task: Task) -> None:
        forward = self.plan.direction is Direction.FORWARD
        query = Payload.QUERY if forward else Payload.QUERY_GRAD
        self._input(query, task.query_slot, task.queries, task.heads)
        self._input(Payload.KEY_VALUE, task.key_value_slot, task.keys, task.heads)
        wanted = [Payload.PARTIAL] if forward else [Payload.DQ, Payload.DKV]
        if [output.payload for output in task.outputs] != wanted:
            self._fail(
                f"task {task.queries} × {task.keys} must have the outputs {', '.join(wanted)}"
            )
        for output in task.outputs:
            self._output(task, output)

    def _input(self, payload: Payload, slot: int | None, tokens: Span, heads: Span) -> None:
        if slot is None:
            if not self._owns(tokens):
                self._fail(f"a task reads {payload} of tokens {tokens} as its own")
            return
        what = f"a task reads {payload} of tokens {tokens}, KV heads {heads}"
        content = self._content(payload, slot, what)
        if not (content.tokens.contains(tokens) and content.heads.contains(heads)):
            self._fail(f"{what}, but slot {slot} holds {content}")
        content.read.append((tokens, heads))
        content.last_use = self.step

    def _output(self, task: Task, output: Output) -> None:
        tokens = result_tokens(task, output)
        if output.slot is None:
            if not self._owns(tokens):
                self._fail(f"a task adds {output.payload} of tokens {tokens} to its own state")
            if not output.accumulate:
                self._fail(f"a task overwrites {output.payload} of tokens {tokens}, its own state")
            return
        if not output.accumulate:
            self._occupy(output.payload, output.slot)
            content = _Content(tokens, task.heads, self.step + 1, False, self.step)
            self.slots[output.payload, output.slot] = content
            return
        self._accumulate(output, tokens, task.heads)

    def _accumulate(self, output: Output, tokens: Span, heads: Span) -> None:
        content = self.slots.get((output.payload, output.slot))
        open_sum = content is not None and not content.received and not content.delivered
        if not open_sum or (content.tokens, content.heads) != (tokens, heads):
            what = f"a task adds {output.payload} of tokens {tokens}, KV heads {heads}"
            self._fail(f"{what} to slot {output.slot}, which has no such sum")
        content.last_use = self.step

    def _content(self, payload: Payload, slot: int, what: str) -> _Content:
        content = self.slots.get((payload, slot))
        if content is None:
            self._fail(f"{what}, but nothing was put into slot {slot}")
        if content.ready > self.step:
            self._fail(f"{what} from slot {slot} before it is there")
        return content

    def _occupy(self, payload: Payload, slot: int) -> None:
        content = self.slots.get((payload, slot))
        if content is not None and content.last_use >= self.step:
            self._fail(
                f"{payload} slot {slot} is reused while its tokens {content.tokens} are in use"
            )
        if content is not None:
            self._retire(payload, slot, " before the slot is reused")

    def _retire(self, payload: Payload, slot: int, when: str = "") -> None:
        content = self.slots.pop((payload, slot))
        name = f"{payload} of {content} in slot {slot}"
        if payload.is_result and content.delivered != 1:
            verb = "merged" if content.received else "sent"
            self._fail(f"{name} is {verb} {content.delivered} times, not once{when}")
        if content.received and not content.is_used_whole():
            self._fail(f"{name} was sent, but is not used whole{when}")


# ---- 5. buffers ---------------------------------------------------------------------------


def _check_buffers(plan: Plan) -> None:
    layout = plan.layout
    # A slot is as long as the longest chunk it ever holds, which need not be the rank's own.
    longest = max(len(chunk.tokens) for chunk in layout.chunks)
    limit = MAX_LIVE_CHUNKS * longest * max(len(layout.chunks_of(r)) for r in range(plan.num_ranks))
    for rank in range(plan.num_ranks):
        sizes: dict[Payload, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for payload, slot, tokens, heads in plan.contents(rank):
            sizes[payload][slot] = max(sizes[payload][slot], len(tokens) * len(heads))
        for payload, slots in sizes.items():
            if sum(slots.values()) > limit * plan.num_kv_heads:
                chunks = sum(slots.values()) / (limit * plan.num_kv_heads) * MAX_LIVE_CHUNKS
                _fail(
                    plan,
                    f"{payload} slots hold {chunks:.1f} chunks, more than {MAX_LIVE_CHUNKS}",
                    rank,
                )
