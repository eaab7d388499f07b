"""The plan: plain data that says what every rank computes, sends, receives and merges, step by
step.

What one step means, for every rank, in this order:

1. wait until the transfers of the step before have arrived;
2. post this step's sends and receives as one group (they run while the step computes);
3. merge the results that have arrived into the state of the tokens this rank owns;
4. compute the step's tasks.

So a transfer posted in step s may be read in step s + 1 at the earliest, a result computed in step
s may be sent in step s + 1 at the earliest, and a slot is free for something new in the step after
its last use.

Tokens are named by their position in the whole sequence and heads by KV head: KV head j stands for
itself and for the query heads that share it, so a plan cannot tear a group apart.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron_distflash.plan.masks import Mask, MaskKind
from megatron_distflash.plan.spans import Span


class PlanError(ValueError):
    """A plan that cannot be built, or that breaks one of the promises ``validate`` checks."""


class Direction(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Payload(StrEnum):
    """What a transfer carries. Each payload has slots of its own on every rank."""

    QUERY = "q"  # query
    KEY_VALUE = "kv"  # key and value
    PARTIAL = "out"  # normalised output of some of a query's keys, with its LSE
    QUERY_GRAD = "qdo"  # query, output gradient, global LSE, delta = rowsum(out * out gradient)
    DQ = "dq"  # gradient of the query from some of its keys
    DKV = "dkv"  # gradients of key and value from some of their queries

    @property
    def is_result(self) -> bool:
        """Results go home from the rank that computed them; the others go out from the owner."""
        return self in (Payload.PARTIAL, Payload.DQ, Payload.DKV)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous range of tokens that one rank owns."""

    tokens: Span
    owner: int


@dataclass(frozen=True)
class Layout:
    """Which rank owns which tokens. A rank holds its chunks one after the other, in token order."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].tokens.stop

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(chunk.owner for chunk in self.chunks)

    @cached_property
    def _filled(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if len(chunk.tokens))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(chunk.tokens.start for chunk in self._filled)

    @cached_property
    def _local_starts(self) -> dict[int, int]:
        held, starts = [0] * self.num_ranks, {}
        for chunk in self._filled:
            starts[chunk.tokens.start] = held[chunk.owner]
            held[chunk.owner] += len(chunk.tokens)
        return starts

    def chunks_of(self, rank: int) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.owner == rank)

    def rank_tokens(self, rank: int) -> int:
        """How many tokens the rank holds."""
        return sum(len(chunk.tokens) for chunk in self.chunks_of(rank))

    def chunk_at(self, tokens: Span) -> Chunk:
        """The chunk that holds all of ``tokens``; PlanError if none does."""
        chunk = self._filled[max(0, bisect_right(self._starts, tokens.start) - 1)]
        if not len(tokens) or not chunk.tokens.contains(tokens):
            raise PlanError(f"tokens {tokens} are not inside one chunk")
        return chunk

    def owner(self, tokens: Span) -> int:
        return self.chunk_at(tokens).owner

    def local(self, tokens: Span) -> Span:
        """Where the owner's local tensors hold ``tokens``."""
        chunk = self.chunk_at(tokens)
        shift = self._local_starts[chunk.tokens.start] - chunk.tokens.start
        return Span(tokens.start + shift, tokens.stop + shift)


def contiguous(lengths: tuple[int, ...]) -> Layout:
    """Rank r holds the r-th chunk; lengths in tokens, zero allowed."""
    return Layout(_chunks(lengths, range(len(lengths))))


def zigzag(lengths: tuple[int, ...]) -> Layout:
    """Rank r of P holds the chunks r and 2P - 1 - r of 2P; ``lengths`` in tokens per rank."""
    halves = [(length // 2, length - length // 2) for length in lengths]
    ordered = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    owners = [*range(len(lengths)), *reversed(range(len(lengths)))]
    return Layout(_chunks(ordered, owners))


def _chunks(lengths, owners) -> tuple[Chunk, ...]:
    chunks, start = [], 0
    for length, owner in zip(lengths, owners, strict=True):
        if length < 0:
            raise PlanError(f"rank {owner} cannot hold {length} tokens")
        chunks.append(Chunk(Span(start, start + length), owner))
        start += length
    return tuple(chunks)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a task's result goes: into a slot, or (None) into the state of this rank's own tokens.

    ``accumulate`` is False for the first result written into a slot, which overwrites what was
    there.
    """

    payload: Payload
    slot: int | None
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Task:
    """One attention block: queries × keys × heads. Slot ``None`` means this rank's own tensors."""

    queries: Span
    keys: Span
    heads: Span
    kind: MaskKind
    query_slot: int | None
    key_value_slot: int | None
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One payload of one range from one rank to another; it stands in both ranks' steps.

    ``source_slot`` None: sent from the owner's own tensors.
    """

    payload: Payload
    tokens: Span
    heads: Span
    source: int
    target: int
    source_slot: int | None
    target_slot: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Adds a received result to the state of this rank's own tokens."""

    payload: Payload
    tokens: Span
    heads: Span
    slot: int


@dataclass(frozen=True, slots=True)
class Step:
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    merges: tuple[Merge, ...] = ()
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True)
class Plan:
    """``steps[rank][step]``; every rank has the same number of steps."""

    schedule: str
    direction: Direction
    layout: Layout
    num_heads: int
    num_kv_heads: int
    mask: Mask
    steps: tuple[tuple[Step, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.steps)

    @property
    def num_steps(self) -> int:
        return len(self.steps[0])

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    def is_helped(self, rank: int, task: Task) -> bool:
        """Whether ``rank`` computes the task as a helper, for another rank's queries."""
        return self.layout.owner(task.queries) != rank

    def contents(self, rank: int) -> list[tuple[Payload, int, Span, Span]]:
        """Everything the rank's slots ever hold: (payload, slot, tokens, heads)."""
        held = []
        for step in self.steps[rank]:
            held += [(t.payload, t.target_slot, t.tokens, t.heads) for t in step.receives]
            for task in step.tasks:
                for output in task.outputs:
                    if output.slot is not None:
                        held.append(
                            (output.payload, output.slot, result_tokens(task, output), task.heads)
                        )
        return held

    def to_json(self) -> str:
        return json.dumps(_encode(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that ``to_json`` wrote; PlanError if the text is something else."""
        try:
            return _decode_plan(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a plan's JSON: {type(error).__name__}: {error}") from error


def result_tokens(task: Task, output: Output) -> Span:
    """The tokens that a task's output belongs to."""
    return task.keys if output.payload is Payload.DKV else task.queries


def _encode(value):
    """Plan and Mask as objects, every other dataclass as the list of its fields."""
    match value:
        case Plan() | Mask():
            return {name: _encode(getattr(value, name)) for name in value.__dataclass_fields__}
        case Layout():
            return _encode(value.chunks)
        case tuple() | list():
            return [_encode(item) for item in value]
        case Span() | Chunk() | Output() | Task() | Transfer() | Merge() | Step():
            return [_encode(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def _decode_plan(data: dict) -> Plan:
    mask = data["mask"]
    return Plan(
        data["schedule"],
        Direction(data["direction"]),
        Layout(tuple(Chunk(Span(*tokens), owner) for tokens, owner in data["layout"])),
        data["num_heads"],
        data["num_kv_heads"],
        Mask(mask["left"], mask["right"], tuple(mask["documents"])),
        tuple(tuple(_decode_step(step) for step in steps) for steps in data["steps"]),
    )


def _decode_step(data: list) -> Step:
    sends, receives, merges, tasks = data
    return Step(
        tuple(_decode_transfer(transfer) for transfer in sends),
        tuple(_decode_transfer(transfer) for transfer in receives),
        tuple(Merge(Payload(m[0]), Span(*m[1]), Span(*m[2]), m[3]) for m in merges),
        tuple(_decode_task(task) for task in tasks),
    )


def _decode_transfer(data: list) -> Transfer:
    payload, tokens, heads, *ends = data
    return Transfer(Payload(payload), Span(*tokens), Span(*heads), *ends)


def _decode_task(data: list) -> Task:
    queries, keys, heads, kind, query_slot, key_value_slot, outputs = data
    return Task(
        Span(*queries),
        Span(*keys),
        Span(*heads),
        MaskKind(kind),
        query_slot,
        key_value_slot,
        tuple(Output(Payload(payload), slot, accumulate) for payload, slot, accumulate in outputs),
    )
