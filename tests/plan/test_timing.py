"""The step that needs a transfer, and the time of plans where transfers take time."""

import random

import pytest

from megatron_distflash.plan import SCHEDULES, Mask, Plan, build, build_backward
from megatron_distflash.plan.plan import Step, Transfer
from megatron_distflash.plan.timing import needs, simulate


def _plan(schedule: str, num_ranks: int, make=build, **options) -> Plan:
    options = {"num_heads": 32, "num_kv_heads": 8, "mask": Mask.causal()} | options
    return make(schedule, (64,) * num_ranks, **options)


@pytest.mark.parametrize("num_ranks", [2, 3, 6, 8])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_needed_is_the_first_read(schedule: str, num_ranks: int) -> None:
    for make in (build, build_backward):
        plan = _plan(schedule, num_ranks, make, prefetch=random.choice([1, 2, 3]))
        found = needs(plan)
        for steps in plan.steps:
            for posted, step in enumerate(steps):
                for transfer in step.receives:
                    later = range(posted + 1, len(steps))
                    assert found[posted, transfer] == next(
                        idx for idx in later if _reads(steps[idx], transfer)
                    )


def _reads(step: Step, transfer: Transfer) -> bool:
    if transfer.payload.is_result:
        slots = [merge.slot for merge in step.merges if merge.payload is transfer.payload]
    elif transfer.payload == "kv":
        slots = [task.key_value_slot for task in step.tasks]
    else:
        slots = [task.query_slot for task in step.tasks]
    return transfer.target_slot in slots


def test_a_plan_by_hand() -> None:
    """Two ranks, whole blocks: half of kv goes one way and half of q the other while the diagonals
    take 1/2; the block takes 1/2; its result, 1/2 chunk, comes home with nothing to hide it."""
    plan = _plan("balanced", 2, cut=False)
    for chunk_time in (0.0, 0.5, 1.0):
        time = simulate(plan, chunk_time)
        assert (time.compute, time.total) == (1.0, 1.0 + 0.5 * chunk_time)
    assert simulate(plan, 3.0).total == 1.5 + 0.5 + 1.5  # q takes longer than the diagonals
    assert simulate(plan, 1.0).exposed == pytest.approx(1 / 3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6, 7, 8, 16, 32])
def test_cut_ends_hide_what_whole_ones_expose(num_ranks: int) -> None:
    """A chunk of 8k tokens takes a fifth of a block's time between GPUs, 64 MiB at 200 GB/s, and a
    quarter over NCCL between four ranks of one. The backward's blocks take 2.5 times as long."""
    for make, block in ((build, 1.0), (build_backward, 2.5)):
        for chunk_time in (0.125, 0.25):
            cut, whole = (_plan("balanced", num_ranks, make, cut=cut) for cut in (True, False))
            assert simulate(cut, chunk_time / block).exposed == pytest.approx(0, abs=1e-9)
            least = 0.2 * chunk_time / block / num_ranks
            assert simulate(whole, chunk_time / block).exposed > least


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
def test_two_steps_hide_more_than_one(num_ranks: int) -> None:
    for make in (build, build_backward):
        one, two = (_plan("balanced", num_ranks, make, prefetch=steps) for steps in (1, 2))
        assert simulate(two, 0.5).total <= simulate(one, 0.5).total
        if num_ranks > 2:
            assert simulate(two, 0.5).total < simulate(one, 0.5).total
