"""Which result is the first and which the last of its rows, so that nothing is initialised or
converted that a kernel can write at once. Read off a plan before it runs.

An *item* is a task or a merge of a step; it writes a result for a rectangle of tokens × heads, to
the state of the rank's own tokens or to a slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_distflash.plan.plan import Merge, Payload, Plan, Task, result_tokens
from megatron_distflash.plan.spans import Span, union

Item = Task | Merge
Region = tuple[Span, Span]  # tokens, heads
Cell = tuple[int, int]  # which of the tokens' and of the heads' edges it begins at


@dataclass(frozen=True, slots=True)
class Write:
    """One result.

    Attributes:
        first: nothing was written before to any of its rows.
        last: nothing will be to any of them.
    """

    first: bool
    last: bool


@dataclass(frozen=True)
class Writes:
    """The results that a rank puts into one payload's state and slots.

    Attributes:
        of: [step, item] its write.
        unset: own rows that need initial values: nothing is ever written to them, or something
            that spans more rows than they are.
        unfinished: own rows whose last write is not ``last``, or which nothing is written to.
        alone: whether one task writes all of the rank's own rows.
    """

    of: dict[tuple[int, Item], Write]
    unset: list[Region]
    unfinished: list[Region]
    alone: bool


def writes_of(plan: Plan, rank: int, payload: Payload) -> Writes:
    """Remembered; plans are compared by identity, as they are too large to be hashed each time."""
    return _writes(Same(plan), rank, payload)


class Same:
    """A plan that equals only itself."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.plan is other.plan


@lru_cache(maxsize=256)
def _writes(same: Same, rank: int, payload: Payload) -> Writes:
    plan = same.plan
    own = [item for item in _items(plan, rank, payload) if item[2] is None]
    chunks = [(chunk.tokens, Span(0, plan.num_kv_heads)) for chunk in plan.layout.chunks_of(rank)]
    grid = _Grid(chunks, [region for *_, region in own])
    of, unset, unfinished = _slot_writes(plan, rank, payload), set(grid.cells), set(grid.cells)
    seen: set[Cell] = set()
    for step_idx, item, _, region in own:
        cells = grid.within(region)
        of[step_idx, item] = Write(first=cells.isdisjoint(seen), last=False)
        if of[step_idx, item].first:
            unset -= cells
        seen |= cells
    seen = set()
    for step_idx, item, _, region in reversed(own):
        cells = grid.within(region)
        if cells.isdisjoint(seen):
            of[step_idx, item] = Write(of[step_idx, item].first, last=True)
            unfinished -= cells
        seen |= cells
    alone = len(own) == 1 and isinstance(own[0][1], Task) and not unset
    return Writes(of, grid.regions(unset), grid.regions(unfinished), alone)


def _slot_writes(plan: Plan, rank: int, payload: Payload) -> dict[tuple[int, Item], Write]:
    found: dict[tuple[int, Item], Write] = {}
    latest: dict[int, tuple[int, Item]] = {}
    for step_idx, item, slot, _ in _items(plan, rank, payload):
        if slot is None:
            continue
        adds = next(o.accumulate for o in item.outputs if o.payload is payload)
        if adds and slot in latest:
            found[latest[slot]] = Write(found[latest[slot]].first, last=False)
        found[step_idx, item] = Write(first=not adds, last=True)
        latest[slot] = step_idx, item
    return found


def _items(
    plan: Plan, rank: int, payload: Payload
) -> Iterator[tuple[int, Item, int | None, Region]]:
    """(step, item, slot that it writes to or None, region), in the order they happen."""
    for step_idx, step in enumerate(plan.steps[rank]):
        for merge in step.merges:
            if merge.payload is payload:
                yield step_idx, merge, None, (merge.tokens, merge.heads)
        for task in step.tasks:
            for output in task.outputs:
                if output.payload is payload:
                    region = result_tokens(task, output), task.heads
                    yield step_idx, task, output.slot, region


class _Grid:
    """The own rows cut at every region's edges: each region is a set of whole cells."""

    def __init__(self, chunks: list[Region], regions: list[Region]) -> None:
        self._edges = tuple(
            sorted({edge for spans in (*chunks, *regions) for edge in _ends(spans[axis])})
            for axis in (0, 1)
        )
        self._places = tuple({edge: idx for idx, edge in enumerate(x)} for x in self._edges)
        self._chunks = [self.within(chunk) for chunk in chunks]
        self.cells: set[Cell] = set().union(*self._chunks)

    def within(self, region: Region) -> set[Cell]:
        if not all(len(span) for span in region):
            return set()
        rows, columns = (
            range(places[span.start], places[span.stop])
            for places, span in zip(self._places, region, strict=True)
        )
        return {(row, column) for row in rows for column in columns}

    def regions(self, cells: set[Cell]) -> list[Region]:
        """The cells as few disjoint rectangles, each inside one chunk."""
        return [region for chunk in self._chunks for region in self._joined(cells & chunk)]

    def _joined(self, cells: set[Cell]) -> Iterator[Region]:
        rows_of: dict[int, list[Span]] = {}  # by column
        for row, column in cells:
            rows_of.setdefault(column, []).append(self._span(0, row))
        columns_of: dict[tuple[Span, ...], list[Span]] = {}
        for column, rows in rows_of.items():
            columns_of.setdefault(tuple(union(rows)), []).append(self._span(1, column))
        for rows, columns in columns_of.items():
            yield from ((tokens, heads) for tokens in rows for heads in union(columns))

    def _span(self, axis: int, idx: int) -> Span:
        return Span(*self._edges[axis][idx : idx + 2])


def _ends(span: Span) -> tuple[int, ...]:
    return (span.start, span.stop) if len(span) else ()
