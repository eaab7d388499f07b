"""From who computes what to a plan: derives the transfers, the slots and the merges.

A builder only decides which rank computes which block in which step. Everything else follows from
ownership: inputs that a rank does not own come from their owner, results for tokens it does not own
go straight home.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from megatron_distflash.plan.masks import Mask, MaskKind
from megatron_distflash.plan.plan import (
    Direction,
    Layout,
    Merge,
    Output,
    Payload,
    Plan,
    Step,
    Task,
    Transfer,
)
from megatron_distflash.plan.spans import Span, union


@dataclass(frozen=True, slots=True)
class Block:
    """A task before it is known where its inputs lie and where its results go."""

    queries: Span
    keys: Span
    heads: Span
    kind: MaskKind


# With two steps a transfer has one to itself, whatever it had to wait for in the other. A third
# would cost one more slot of everything.
PREFETCH = 2

# work[step][rank]: the blocks that the rank computes in that step, in order
Work = list[list[list[Block]]]


@dataclass(slots=True)
class _Use:
    """One content of a slot: busy in the steps ``first`` to ``last``, both included."""

    payload: Payload
    rank: int
    first: int
    last: int
    slot: int = -1


@dataclass(slots=True)
class _Move:
    """A transfer before its slots are known."""

    payload: Payload
    tokens: Span
    heads: Span
    source: int
    target: int
    step: int
    sent_from: _Use | None
    lands_in: _Use

    def transfer(self) -> Transfer:
        source_slot = None if self.sent_from is None else self.sent_from.slot
        ends = (self.source, self.target, source_slot, self.lands_in.slot)
        return Transfer(self.payload, self.tokens, self.heads, *ends)


@dataclass(slots=True)
class _Draft:
    """The plan while it is being derived."""

    layout: Layout
    direction: Direction
    prefetch: int
    moves: list[_Move] = field(default_factory=list)
    inputs: dict[tuple, list[_Move]] = field(default_factory=lambda: defaultdict(list))
    results: dict[tuple, _Use] = field(default_factory=dict)

    @property
    def uses(self) -> list[_Use]:
        landed = [move.lands_in for move in self.moves]
        return landed + list(self.results.values())


def lower(
    work: Work,
    *,
    schedule: str,
    direction: Direction,
    layout: Layout,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask,
    prefetch: int = PREFETCH,
) -> Plan:
    """Derive the plan for ``work``.

    Args:
        work: blocks per step and rank, see ``Work``. Blocks that need remote inputs in step 0 move
            the whole work behind a step without tasks.
        prefetch: how many steps transfers may take: inputs are sent that many before their use,
            results merged that many after they were sent, or after the last task.
    """
    num_ranks = layout.num_ranks
    if any(
        _input_payloads(layout, direction, rank, b)
        for rank in range(num_ranks)
        for b in work[0][rank]
    ):
        work = [[[] for _ in range(num_ranks)], *work]
    draft = _Draft(layout, direction, prefetch)
    for step_idx, step in enumerate(work):
        for rank, blocks in enumerate(step):
            _fetch_inputs(draft, step_idx, rank, blocks)
            _return_results(draft, step_idx, rank, blocks, len(work))
    _assign_slots(draft.uses)
    steps = _assemble(draft, work)
    return Plan(schedule, direction, layout, num_heads, num_kv_heads, mask, steps)


def blocks_of(plan: Plan) -> Work:
    """The work a plan was derived from."""
    return [
        [[Block(t.queries, t.keys, t.heads, t.kind) for t in plan.steps[rank][step].tasks]
         for rank in range(plan.num_ranks)]
        for step in range(plan.num_steps)
    ]  # fmt: skip


def _input_payloads(layout: Layout, direction: Direction, rank: int, block: Block):
    """(payload, tokens) of the inputs that ``rank`` does not own."""
    query = Payload.QUERY if direction is Direction.FORWARD else Payload.QUERY_GRAD
    inputs = ((query, block.queries), (Payload.KEY_VALUE, block.keys))
    return [(payload, tokens) for payload, tokens in inputs if layout.owner(tokens) != rank]


def _result_payloads(direction: Direction, block: Block):
    if direction is Direction.FORWARD:
        return [(Payload.PARTIAL, block.queries)]
    return [(Payload.DQ, block.queries), (Payload.DKV, block.keys)]


def _fetch_inputs(draft: _Draft, step_idx: int, rank: int, blocks: list[Block]) -> None:
    """One transfer for each range that this step's blocks need, however many of them share it."""
    needed = defaultdict(list)
    for block in blocks:
        for payload, tokens in _input_payloads(draft.layout, draft.direction, rank, block):
            needed[payload, draft.layout.chunk_at(tokens), block.heads].append(tokens)
    posted = max(0, step_idx - draft.prefetch)
    for (payload, chunk, heads), spans in needed.items():
        for tokens in union(spans):
            use = _Use(payload, rank, posted, step_idx)
            move = _Move(payload, tokens, heads, chunk.owner, rank, posted, None, use)
            draft.moves.append(move)
            draft.inputs[step_idx, rank, payload].append(move)


def _return_results(
    draft: _Draft, step_idx: int, rank: int, blocks: list[Block], num_work_steps: int
) -> None:
    """One slot and one transfer for each remote range; blocks with the same range add up in it."""
    for block in blocks:
        for payload, tokens in _result_payloads(draft.direction, block):
            owner = draft.layout.owner(tokens)
            key = (step_idx, rank, payload, tokens, block.heads)
            if owner == rank or key in draft.results:
                continue
            sent = step_idx + 1
            merged = max(sent + 1, min(sent + draft.prefetch, num_work_steps))
            produced = draft.results[key] = _Use(payload, rank, step_idx, sent)
            landed = _Use(payload, owner, sent, merged)
            move = _Move(payload, tokens, block.heads, rank, owner, sent, produced, landed)
            draft.moves.append(move)


def _assign_slots(uses: list[_Use]) -> None:
    """The lowest free slot for each content, in order of its first step."""
    pools: dict[tuple[int, Payload], list[int]] = defaultdict(list)  # last busy step of each slot
    for use in sorted(uses, key=lambda use: (use.first, use.last)):
        pool = pools[use.rank, use.payload]
        free = (slot for slot, busy_until in enumerate(pool) if busy_until < use.first)
        use.slot = next(free, len(pool))
        if use.slot == len(pool):
            pool.append(use.last)
        pool[use.slot] = use.last


def _assemble(draft: _Draft, work: Work) -> tuple[tuple[Step, ...], ...]:
    num_ranks = draft.layout.num_ranks
    num_steps = max([len(work), *(move.lands_in.last + 1 for move in draft.moves)])
    sends, receives, merges = (_table(num_ranks, num_steps) for _ in range(3))
    for move in draft.moves:
        transfer = move.transfer()
        sends[move.source][move.step].append(transfer)
        receives[move.target][move.step].append(transfer)
        if move.payload.is_result:
            merge = Merge(move.payload, move.tokens, move.heads, transfer.target_slot)
            merges[move.target][move.lands_in.last].append(merge)
    tasks = _table(num_ranks, num_steps)
    for step_idx, step in enumerate(work):
        for rank, blocks in enumerate(step):
            tasks[rank][step_idx] = _tasks(draft, step_idx, rank, blocks)
    columns = zip(sends, receives, merges, tasks, strict=True)
    return tuple(
        tuple(Step(*map(tuple, parts)) for parts in zip(*column, strict=True)) for column in columns
    )


def _table(num_ranks: int, num_steps: int) -> list[list[list]]:
    return [[[] for _ in range(num_steps)] for _ in range(num_ranks)]


def _tasks(draft: _Draft, step_idx: int, rank: int, blocks: list[Block]) -> list[Task]:
    tasks, written = [], set()
    for block in blocks:
        slots = {}
        for payload, tokens in _input_payloads(draft.layout, draft.direction, rank, block):
            moves = draft.inputs[step_idx, rank, payload]
            found = [m for m in moves if m.heads == block.heads and m.tokens.contains(tokens)]
            assert found, (
                f"no transfer brings {payload} {tokens} to rank {rank} for step {step_idx}"
            )
            slots[payload] = found[0].lands_in.slot
        outputs = []
        for payload, tokens in _result_payloads(draft.direction, block):
            key = (step_idx, rank, payload, tokens, block.heads)
            use = draft.results.get(key)
            slot = None if use is None else use.slot
            outputs.append(Output(payload, slot, use is None or key in written))
            written.add(key)
        query_slot = slots.get(Payload.QUERY, slots.get(Payload.QUERY_GRAD))
        key_value_slot = slots.get(Payload.KEY_VALUE)
        place = (query_slot, key_value_slot, tuple(outputs))
        tasks.append(Task(block.queries, block.keys, block.heads, block.kind, *place))
    return tasks


__all__ = ["Block", "Work", "blocks_of", "lower"]
