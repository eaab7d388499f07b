"""Every schedule builds plans that are right, or refuses the mask by name.

``build`` and ``build_backward`` validate what they return; that they do is a test of its own.
"""

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distflash.plan import (
    SCHEDULES,
    Mask,
    Payload,
    PlanError,
    backward,
    build,
    build_backward,
)
from tests.plan.breaking import (
    adjust,
    balanced,
    change,
    delay,
    double,
    drop,
    remake,
    remove,
    transfer_of,
)
from tests.plan.cases import HEADS, attends, heads, lengths, masks, schedules
from tests.plan.replay import replay

HELPING = ("balanced", "paper")


@st.composite
def cases(draw, max_ranks: int, max_tokens: int):
    """Arguments of ``build``: (schedule, lengths), options."""
    ranks = draw(lengths(max_ranks, max_tokens))
    num_heads, num_kv_heads = draw(heads)
    options = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "mask": draw(masks(sum(ranks))),
    }
    return (draw(schedules), ranks), options


def _build_both(schedule, ranks, **options):
    """(forward, backward), or None where the schedule refuses, which only two may."""
    try:
        plan = build(schedule, ranks, **options)
    except PlanError as error:
        mask = options["mask"].simplified(sum(ranks))
        assert schedule in HELPING and mask not in (Mask.causal(), Mask.full())
        assert repr(schedule) in str(error) and f"'{mask}'" in str(error)
        return None
    return plan, build_backward(schedule, ranks, **options)


@settings(max_examples=40, deadline=None)
@given(cases(max_ranks=32, max_tokens=40))
def test_builds_valid_plans_or_refuses_by_name(case):
    names, options = case
    for plan in _build_both(*names, **options) or ():
        assert plan.schedule == names[0] and plan.num_ranks == len(names[1])


@settings(max_examples=120, deadline=None)
@given(cases(max_ranks=7, max_tokens=6))
def test_every_pair_is_attended_once_and_comes_home(case):
    """Replayed without any of validate's code."""
    names, options = case
    wanted = attends(options["mask"], sum(names[1]))[..., None].astype(int)
    for plan in _build_both(*names, **options) or ():
        for payload, counts in replay(plan).items():
            assert (counts == wanted).all(), f"{plan.direction} {payload}"


def _result_left_behind(plan):
    return remove(change(plan, 2, 3, merges=drop(0)), 2, transfer_of(plan, 2, 0, 2))


def _slot_refilled_early(plan):
    plan = remake(plan, 1, transfer_of(plan, 1, 2, 3), target_slot=0)
    return change(plan, 3, 2, tasks=adjust(0, key_value_slot=0))


@pytest.mark.parametrize(
    "break_it",
    [
        lambda plan: change(plan, 1, 2, tasks=drop(0)),
        lambda plan: change(plan, 1, 2, tasks=double(0)),
        lambda plan: delay(plan, 1, transfer_of(plan, 1, 0, 1), later=2),
        lambda plan: change(plan, 2, 3, merges=double(0)),
        _result_left_behind,
        _slot_refilled_early,
    ],
    ids=["dropped", "doubled", "late", "merged twice", "left behind", "refilled early"],
)
def test_the_replay_notices_broken_plans(break_it):
    wanted = attends(Mask.causal(), 32)[..., None]
    assert (replay(balanced())[Payload.PARTIAL] == wanted).all()
    try:
        counts = replay(break_it(balanced()))[Payload.PARTIAL]
    except AssertionError:
        return
    assert (counts != wanted).any()


def _nobody_attends_to_others(layout, heads, mask):
    blocks = SCHEDULES["ring"](layout, heads, mask)
    return blocks[:1]


def test_build_validates(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "lonely", _nobody_attends_to_others)
    with pytest.raises(PlanError, match="queries 4:8 × keys 0:4 × heads 0:2 are computed never"):
        build("lonely", (4, 4), num_heads=2, num_kv_heads=2, mask=Mask.causal())


def test_build_backward_validates(monkeypatch):
    module = sys.modules[build.__wrapped__.__module__]
    monkeypatch.setattr(module, "backward", lambda plan, prefetch: _without_tasks(plan))
    options = {"num_heads": 3, "num_kv_heads": 3, "mask": Mask.causal()}
    with pytest.raises(PlanError, match="are computed never"):
        build_backward("ring", (4, 5), **options)


def _without_tasks(plan):
    steps = tuple(tuple(replace(step, tasks=()) for step in steps) for steps in plan.steps)
    return replace(plan, steps=steps)


@pytest.mark.parametrize("num_ranks", range(1, 33))
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_number_of_ranks(schedule, num_ranks):
    num_heads, num_kv_heads = HEADS[num_ranks % len(HEADS)]
    ragged = tuple((rank * 7) % 5 for rank in range(1, num_ranks + 1))
    ranks = (16,) * num_ranks if num_ranks % 3 else ragged
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "mask": Mask.causal()}
    build(schedule, ranks, **options)
    build_backward(schedule, ranks, **options)


@pytest.mark.parametrize("schedule", ["paper", "zigzag"])  # balanced: see test_cost.py
def test_sixty_four_ranks(schedule):
    options = {"num_heads": 8, "num_kv_heads": 2, "mask": Mask.causal()}
    build(schedule, (128,) * 64, **options)
    build_backward(schedule, (128,) * 64, **options)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_inputs_may_travel_ahead(schedule, prefetch):
    options = {"num_heads": 4, "num_kv_heads": 2, "mask": Mask.causal(), "prefetch": prefetch}
    wanted = attends(Mask.causal(), 24)[..., None]
    for plan in (
        build(schedule, (4,) * 6, **options),
        build_backward(schedule, (4,) * 6, **options),
    ):
        for counts in replay(plan).values():
            assert (counts == wanted).all()


@pytest.mark.parametrize("schedule", HELPING)
@pytest.mark.parametrize("mask", [Mask.sliding_window(9), Mask.packed((0, 5, 32))], ids=str)
def test_helping_schedules_refuse_what_they_cannot_balance(schedule, mask):
    with pytest.raises(PlanError, match=f"'{schedule}' cannot balance .* '{mask}'"):
        build(schedule, (8,) * 4, num_heads=4, num_kv_heads=4, mask=mask)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "spiral"}, "unknown schedule 'spiral'; choose one of balanced, paper, ring"),
        ({"lengths": ()}, "at least one rank and one token"),
        ({"lengths": (0, 0)}, "at least one rank and one token"),
        ({"lengths": (4, -1)}, "rank 1 cannot hold -1 tokens"),
        ({"num_kv_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"num_kv_heads": 0}, "4 query heads cannot share 0 KV heads evenly"),
        (
            {"schedule": "ring", "mask": Mask.packed((0, 7))},
            "last document ends at token 7, the sequence at 8",
        ),
    ],
)
def test_arguments_that_make_no_plan(arguments, message):
    defaults = {
        "schedule": "balanced",
        "lengths": (4, 4),
        "num_heads": 4,
        "num_kv_heads": 4,
        "mask": Mask.causal(),
    }
    arguments = defaults | arguments
    with pytest.raises(PlanError, match=message):
        build(arguments.pop("schedule"), arguments.pop("lengths"), **arguments)


def test_balanced_halves_the_far_pairs_by_heads():
    options = {"mask": Mask.causal(), "cut": False}
    plan = build("balanced", (8,) * 4, num_heads=8, num_kv_heads=4, **options)
    shared = [task for step in plan.steps[0] for task in step.tasks if plan.is_helped(0, task)]
    assert [(str(task.queries), str(task.heads)) for task in shared] == [
        ("16:24", "2:4"),
        ("24:32", "0:4"),
    ]


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_balanced_halves_by_rows_where_heads_cannot_be_halved(num_kv_heads):
    options = {"num_heads": 6, "num_kv_heads": num_kv_heads, "mask": Mask.causal()}
    plan = build("balanced", (8, 8), cut=False, **options)
    shared = [task for step in plan.steps[0] for task in step.tasks if plan.is_helped(0, task)]
    assert [(str(task.queries), len(task.heads)) for task in shared] == [("8:12", num_kv_heads)]


def test_backward_keeps_each_block_on_its_rank_and_moves_results_home():
    """An owner's block sends dKV to the keys' owner, a helper's dQ to the queries' owner."""
    plan = build("balanced", (8,) * 8, num_heads=8, num_kv_heads=4, mask=Mask.causal())
    back = backward(plan)
    for rank in range(8):
        forward_blocks = {_place(task) for step in plan.steps[rank] for task in step.tasks}
        tasks = [task for step in back.steps[rank] for task in step.tasks]
        assert {_place(task) for task in tasks} == forward_blocks
        for task in tasks:
            leaves = {output.payload for output in task.outputs if output.slot is not None}
            helped, own_keys = back.is_helped(rank, task), back.layout.owner(task.keys) == rank
            assert leaves == (
                ({Payload.DQ} if helped else set()) | (set() if own_keys else {Payload.DKV})
            )


def _place(task):
    return task.queries, task.keys, task.heads, task.kind


def test_backward_of_a_backward_plan_is_refused():
    plan = build_backward("ring", (4, 4), num_heads=1, num_kv_heads=1, mask=Mask.causal())
    with pytest.raises(PlanError, match="derived from a forward plan"):
        backward(plan)


def test_masks_that_amount_to_causal_are_balanced():
    lengths = (3, 4, 3)
    plain = build("balanced", lengths, num_heads=4, num_kv_heads=2, mask=Mask.causal())
    for mask in (Mask.sliding_window(10), Mask.sliding_window(99), Mask.packed((0, 10))):
        assert build("balanced", lengths, num_heads=4, num_kv_heads=2, mask=mask) == plain
    with pytest.raises(PlanError, match="sliding window"):
        build("balanced", lengths, num_heads=4, num_kv_heads=2, mask=Mask.sliding_window(9))


def test_one_rank_takes_any_mask_with_any_schedule():
    for schedule in SCHEDULES:
        plan = build(schedule, (8,), num_heads=2, num_kv_heads=1, mask=Mask.sliding_window(3))
        assert plan.num_steps == 1
