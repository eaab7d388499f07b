"""First and last results of rows, against a replay row by row; and states that follow them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distflash.plan import Mask, Payload, Plan, build, build_backward
from megatron_distflash.plan.plan import Task, result_tokens
from megatron_distflash.runtime.state import State, add, cast, merge, rounded, store
from megatron_distflash.runtime.writes import Writes, writes_of
from tests.plan import cases
from tests.runtime.states import empty_state

RESULTS = {"forward": [Payload.PARTIAL], "backward": [Payload.DQ, Payload.DKV]}


def own_events(plan: Plan, rank: int, payload: Payload):
    """(step, item, tokens, heads) of every result for the rank's own rows, in order."""
    for step_idx, step in enumerate(plan.steps[rank]):
        for merge_item in step.merges:
            if merge_item.payload is payload:
                yield step_idx, merge_item, merge_item.tokens, merge_item.heads
        for task in step.tasks:
            for output in task.outputs:
                if output.payload is payload and output.slot is None:
                    yield step_idx, task, result_tokens(task, output), task.heads


def rows_of(tokens, heads) -> set[tuple[int, int]]:
    spans = range(tokens.start, tokens.stop), range(heads.start, heads.stop)
    return {(token, head) for token in spans[0] for head in spans[1]}


def check_own(plan: Plan, rank: int, payload: Payload, writes: Writes) -> None:
    """Every row is initialised or first written by a first write, and finished or cast."""
    holds = set().union(*(rows_of(*region) for region in writes.unset))
    finished: set[tuple[int, int]] = set()
    events = list(own_events(plan, rank, payload))
    for step_idx, item, tokens, heads in events:
        rows, write = rows_of(tokens, heads), writes.of[step_idx, item]
        assert holds.isdisjoint(rows) if write.first else rows <= holds, "read before written"
        assert rows.isdisjoint(finished), "written after it was finished"
        holds |= rows
        finished |= rows if write.last else set()
    own = [rows_of(chunk.tokens, Heads(plan)) for chunk in plan.layout.chunks_of(rank)]
    unfinished = [rows_of(*region) for region in writes.unfinished]
    assert holds == set().union(*own)
    assert sum(map(len, unfinished)) == len(set().union(*unfinished)), "cast twice"
    assert set().union(*unfinished) == set().union(*own) - finished
    for region in (*writes.unset, *writes.unfinished):
        plan.layout.local(region[0])  # inside one chunk
    whole = len(events) == 1 and rows_of(*events[0][2:]) == set().union(*own)
    assert writes.alone == (whole and isinstance(events[0][1], Task))


class Heads:
    def __init__(self, plan: Plan) -> None:
        self.start, self.stop = 0, plan.num_kv_heads


def check_slots(plan: Plan, rank: int, payload: Payload, writes: Writes) -> None:
    """A slot's last result is followed by none that is added to it; a first one overwrites."""
    open_slots: dict[int, bool] = {}
    for step_idx, step in enumerate(plan.steps[rank]):
        for task in step.tasks:
            for output in task.outputs:
                if output.payload is payload and output.slot is not None:
                    write = writes.of[step_idx, task]
                    assert write.first != output.accumulate
                    assert write.first or open_slots[output.slot], "added to what was finished"
                    open_slots[output.slot] = not write.last
        for transfer in step.sends:
            if transfer.payload is payload:
                assert not open_slots[transfer.source_slot], "sent before it was finished"


@st.composite
def plans(draw) -> Plan:
    lengths = draw(cases.lengths(max_ranks=8, max_tokens=9))
    schedule = draw(cases.schedules)
    num_tokens = sum(lengths)
    mask = Mask(None, draw(st.sampled_from([None, 0])), ())
    if schedule in ("ring", "zigzag") or len(lengths) == 1:
        left = draw(st.none() | st.integers(0, num_tokens)) if mask.right == 0 else None
        mask = Mask(left, mask.right, draw(st.just(()) | cases.documents(num_tokens)))
    num_heads, num_kv_heads = draw(cases.heads)
    make = draw(st.sampled_from([build, build_backward]))
    return make(schedule, lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, mask=mask)


@settings(max_examples=200, deadline=None)
@given(plans())
def test_any_plan(plan):
    for rank in range(plan.num_ranks):
        for payload in RESULTS[plan.direction.value]:
            writes = writes_of(plan, rank, payload)
            check_own(plan, rank, payload, writes)
            check_slots(plan, rank, payload, writes)


@pytest.mark.parametrize("schedule", ["balanced", "paper", "ring"])
def test_one_rank_writes_its_rows_once(schedule):
    """Then a call costs what the kernel costs: no state, no merge, no cast."""
    plan = build(schedule, (64,), num_heads=4, num_kv_heads=2, mask=Mask.causal())
    writes = writes_of(plan, 0, Payload.PARTIAL)
    assert writes.alone and not writes.unset and not writes.unfinished
    assert writes_of(plan, 0, Payload.PARTIAL) is writes


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_nothing_is_initialised_by_itself(num_ranks):
    """Balanced and zigzag plans begin with a first write of all rows."""
    for schedule in ("balanced", "zigzag"):
        heads = {"num_heads": 8, "num_kv_heads": 2, "mask": Mask.causal()}
        plan = build(schedule, (64,) * num_ranks, **heads)
        for rank in range(num_ranks):
            assert not writes_of(plan, rank, Payload.PARTIAL).unset


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_states_that_are_stored_to_in_turn(seed, dtype):
    """First, middle and last results give what merging them into an empty state does."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.empty(6, 2, 3, 8, dtype=dtype)
    expected, expected_lse = empty_state(q)
    parts = []
    for _ in range(3):
        part = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
        lse = torch.randn(q.shape[:-1], generator=generator, dtype=expected_lse.dtype)
        merge(expected, expected_lse, part, lse)
        parts.append((part, lse))
    acc, lse = torch.full_like(expected, torch.nan), torch.full_like(expected_lse, torch.nan)
    out = torch.full_like(q, torch.nan)
    store(State(acc, lse), *parts[0])
    store(State(acc, lse, accumulate=True), *parts[1])
    assert out.isnan().all()
    store(State(acc, lse, out, accumulate=True), *parts[2])
    assert torch.equal(out, expected.to(dtype)) and torch.equal(lse, expected_lse)
    alone, alone_lse = torch.full_like(q, torch.nan), torch.full_like(lse, torch.nan)
    store(State(None, alone_lse, alone), *parts[0])
    assert torch.equal(alone, parts[0][0]) and torch.equal(alone_lse, parts[0][1])


def test_sums_and_rounding():
    total, part = torch.ones(2, 1, 1, 8), torch.full((2, 1, 1, 8), 0.5, dtype=torch.bfloat16)
    add(total, part)
    assert (total == 1.5).all()
    assert rounded(total, torch.float32) is total
    narrow = rounded(total, torch.float16)
    assert narrow.dtype == torch.float16 and (narrow == 1.5).all()
    cast(part, total)
    assert (part == 1.5).all()
