"""Runs a plan on all ranks at once and counts who attended to what.

Shares no code with ``validate``: it follows the meaning of a step in ``plan.py`` and moves arrays
of counts, [query, key, KV head], where an executor moves tensors. Transfers behave as badly as they
may: what they read is read when the step ends, what they write is spoilt from the step's start on.
"""

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from megatron_distflash.plan import Direction, MaskKind, Payload, Plan
from tests.plan.cases import within_band

SPOILT = None


@dataclass
class Held:
    """What a slot holds: a range of tokens and heads, and for results the counts."""

    payload: Payload
    tokens: range
    heads: range
    counts: np.ndarray | None = None  # [query, key, KV head] of the whole sequence


def replay(plan: Plan) -> dict[Payload, np.ndarray]:
    """How often each [query, key, KV head] went into each result that its owner ended up with."""
    num_tokens = plan.layout.num_tokens
    shape = (num_tokens, num_tokens, plan.num_kv_heads)
    results = (
        [Payload.PARTIAL] if plan.direction is Direction.FORWARD else [Payload.DQ, Payload.DKV]
    )
    totals = {payload: np.zeros(shape, dtype=int) for payload in results}
    slots = [{} for _ in range(plan.num_ranks)]
    for step_idx in range(plan.num_steps):
        steps = [plan.steps[rank][step_idx] for rank in range(plan.num_ranks)]
        for rank, step in enumerate(steps):
            for transfer in step.receives:
                slots[rank][transfer.payload, transfer.target_slot] = SPOILT
        for rank, step in enumerate(steps):
            for merge in step.merges:
                held = slots[rank][merge.payload, merge.slot]
                assert held is not SPOILT
                assert held.payload is merge.payload and _owns(plan, rank, held.tokens)
                assert (held.tokens, held.heads) == (_range(merge.tokens), _range(merge.heads))
                totals[merge.payload] += held.counts
            for task in step.tasks:
                _compute(plan, rank, task, slots[rank], totals)
        _deliver(plan, steps, slots)
    return totals


def _compute(plan: Plan, rank: int, task, slots: dict, totals: dict) -> None:
    forward = plan.direction is Direction.FORWARD
    query = Payload.QUERY if forward else Payload.QUERY_GRAD
    inputs = [
        (query, task.query_slot, task.queries),
        (Payload.KEY_VALUE, task.key_value_slot, task.keys),
    ]
    for payload, slot, tokens in inputs:
        if slot is None:
            assert _owns(plan, rank, _range(tokens))
        else:
            held = slots[payload, slot]
            assert held is not SPOILT
            assert set(_range(tokens)) <= set(held.tokens)
            assert set(_range(task.heads)) <= set(held.heads)
    counts = _task_counts(plan, task)
    for output in task.outputs:
        tokens = _range(task.keys if output.payload is Payload.DKV else task.queries)
        if output.slot is None:
            assert _owns(plan, rank, tokens)
            totals[output.payload] += counts
        elif output.accumulate:
            held = slots[output.payload, output.slot]
            assert (held.tokens, held.heads) == (tokens, _range(task.heads))
            held.counts = held.counts + counts
        else:
            held = Held(output.payload, tokens, _range(task.heads), counts)
            slots[output.payload, output.slot] = held


def _task_counts(plan: Plan, task) -> np.ndarray:
    """[query, key, KV head]: what the kernel computes, which knows its kind and no documents."""
    num_tokens = plan.layout.num_tokens
    query, key = np.ogrid[_range(task.queries), _range(task.keys)]
    left, right = {
        MaskKind.FULL: (None, None),
        MaskKind.CAUSAL: (None, 0),
        MaskKind.BAND: (plan.mask.left, plan.mask.right),
    }[task.kind]
    counts = np.zeros((num_tokens, num_tokens, plan.num_kv_heads), dtype=int)
    seen = within_band(query, key, left, right)
    counts[np.ix_(_range(task.queries), _range(task.keys), _range(task.heads))] += seen[..., None]
    return counts


def _deliver(plan: Plan, steps, slots: list[dict]) -> None:
    """The i-th send from one rank to another fills the i-th receive; nothing else pairs them."""
    wires = defaultdict(deque)
    for rank, step in enumerate(steps):
        for transfer in step.sends:
            wires[rank, transfer.target].append(_sent(plan, rank, transfer, slots[rank]))
    for rank, step in enumerate(steps):
        for transfer in step.receives:
            held = wires[transfer.source, rank].popleft()
            expected = (transfer.payload, _range(transfer.tokens), _range(transfer.heads))
            assert (held.payload, held.tokens, held.heads) == expected
            slots[rank][transfer.payload, transfer.target_slot] = held
    assert not any(wires.values()), "something was sent that nobody received"


def _sent(plan: Plan, rank: int, transfer, slots: dict) -> Held:
    tokens, heads = _range(transfer.tokens), _range(transfer.heads)
    if transfer.source_slot is None:
        assert _owns(plan, rank, tokens)
        return Held(transfer.payload, tokens, heads)
    held = slots[transfer.payload, transfer.source_slot]
    assert (held.tokens, held.heads) == (tokens, heads)
    return Held(held.payload, held.tokens, held.heads, held.counts)


def _owns(plan: Plan, rank: int, tokens: range) -> bool:
    chunks = [chunk.tokens for chunk in plan.layout.chunks if chunk.owner == rank]
    return all(any(c.start <= token < c.stop for c in chunks) for token in tokens)


def _range(span) -> range:
    return range(span.start, span.stop)
