"""What the cuts leave to hide behind: first arrivals under local work, last returns too."""

from fractions import Fraction

import pytest

from megatron_distflash.plan import Mask, Plan, build, build_backward
from megatron_distflash.plan.cost import cost, step_work

RANKS = [*range(2, 17), 31, 32]


def _plans(num_ranks: int, **options) -> tuple[Plan, Plan]:
    options = {"num_heads": 32, "num_kv_heads": 8, "mask": Mask.causal()} | options
    lengths = (64,) * num_ranks
    return build("balanced", lengths, **options), build_backward("balanced", lengths, **options)


def _is_local(plan: Plan, rank: int, step_idx: int) -> bool:
    return all(
        task.query_slot is None
        and task.key_value_slot is None
        and all(output.slot is None for output in task.outputs)
        for task in plan.steps[rank][step_idx].tasks
    )


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_quarter_of_a_block_hides_either_end(num_ranks: int) -> None:
    for plan in _plans(num_ranks):
        computed = [idx for idx in range(plan.num_steps) if any(s[idx].tasks for s in plan.steps)]
        for rank in range(num_ranks):
            for step_idx in (0, computed[-1]):
                assert _is_local(plan, rank, step_idx)
                assert step_work(plan, rank, step_idx) == Fraction(1, 4)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_nothing_travels_after_the_last_task(num_ranks: int) -> None:
    for plan in _plans(num_ranks):
        for steps in plan.steps:
            last = max(idx for idx, step in enumerate(steps) if step.tasks)
            assert not any(step.sends or step.receives for step in steps[last + 1 :])
            assert len(steps) <= last + 2


@pytest.mark.parametrize("num_ranks", RANKS)
def test_what_arrives_first_and_leaves_last_is_half_of_a_pair(num_ranks: int) -> None:
    """A quarter of the heads at even P, half of them at odd P."""
    for plan in _plans(num_ranks):
        sends = [[step.sends for step in steps] for steps in plan.steps]
        used_next = {transfer for rank in range(num_ranks) for transfer in sends[rank][0]}
        used_next &= {transfer for rank in range(num_ranks) for transfer in _read_in(plan, rank, 1)}
        last = {t for rank in range(num_ranks) for t in sends[rank][plan.num_steps - 2]}
        for transfers in (used_next, last):
            assert {len(transfer.heads) for transfer in transfers} == {4 if num_ranks % 2 else 2}


def _read_in(plan: Plan, rank: int, step_idx: int) -> set:
    slots = {
        slot
        for task in plan.steps[rank][step_idx].tasks
        for slot in (("kv", task.key_value_slot), ("q", task.query_slot), ("qdo", task.query_slot))
    }
    return {t for t in plan.steps[rank][0].receives if (t.payload.value, t.target_slot) in slots}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_cuts_cost_nothing_and_move_nothing_twice(num_ranks: int) -> None:
    cut, whole = (cost(_plans(num_ranks, cut=choice)[0]) for choice in (True, False))
    assert cut.critical_path == whole.critical_path and cut.idle_fraction == 0
    assert cut.volume_forward_mean == pytest.approx(whole.volume_forward_mean)
    assert cut.volume_backward_mean == pytest.approx(whole.volume_backward_mean)
    assert cut.steps == whole.steps + 2


def test_one_rank_and_single_tokens_are_not_cut() -> None:
    options = {"num_heads": 2, "num_kv_heads": 2, "mask": Mask.causal()}
    assert build("balanced", (64,), **options).num_steps == 1
    plan = build("balanced", (1, 1), **options)
    assert all(len(steps[0].tasks) == 1 for steps in plan.steps)


@pytest.mark.parametrize("schedule", ["paper", "ring"])
def test_published_schedules_are_not_cut(schedule: str) -> None:
    options = {"num_heads": 8, "num_kv_heads": 8, "mask": Mask.causal()}
    assert build(schedule, (64,) * 4, **options) == build(schedule, (64,) * 4, cut=False, **options)


def test_zigzag_ends_with_the_square_between_its_chunks() -> None:
    plan = build("zigzag", (64,) * 4, num_heads=8, num_kv_heads=8, mask=Mask.causal())
    for rank, steps in enumerate(plan.steps):
        assert [task.kind for task in steps[0].tasks] == ["causal", "causal"]
        (task,) = [step for step in steps if step.tasks][-1].tasks
        chunks = plan.layout.chunks_of(rank)
        assert (task.queries, task.keys) == (chunks[1].tokens, chunks[0].tokens)
