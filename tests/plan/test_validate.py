"""Broken plans and what ``validate`` says of them: coverage, sides of transfers, buffers."""

import re
from dataclasses import replace

import pytest

from megatron_distflash.plan import Mask, MaskKind, Payload, PlanError, build, validate
from megatron_distflash.plan.plan import Chunk, Layout, Task, contiguous
from megatron_distflash.plan.spans import Span
from tests.plan.breaking import (
    ALL_HEADS,
    HEADS,
    OWN_STATE,
    add,
    adjust,
    balanced,
    balanced_backward,
    change,
    double,
    drop,
    expect,
    input_transfer,
    packed,
    reverse,
    transfer_of,
    window,
    zigzag,
    zigzag_backward,
)


def _own_task(queries: Span, keys: Span, heads: Span = ALL_HEADS) -> Task:
    return Task(queries, keys, heads, MaskKind.FULL, None, None, OWN_STATE)


def test_the_plans_are_valid_before_they_are_broken():
    for plan in (balanced(), balanced_backward(), zigzag(), zigzag_backward(), window(), packed()):
        validate(plan)
    validate(build("ring", (8, 8), num_heads=2, num_kv_heads=1, mask=Mask.full()))


# ---- the shape ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layout": Layout((Chunk(Span(0, 8), 0), Chunk(Span(9, 32), 3)))},
            "chunks must follow each other: 9:32 after token 8",
        ),
        (
            {"layout": Layout((Chunk(Span(0, 8), 0), Chunk(Span(8, 7), 3)))},
            "chunks must follow each other: 8:7 after token 8",
        ),
        ({"layout": contiguous((0,) * 4)}, "layout holds no tokens"),
        ({"layout": contiguous((16, 16))}, "the layout has 2 ranks, the plan 4"),
        ({"mask": Mask.packed((0, 30))}, "last document ends at token 30, the sequence at 32"),
        ({"num_heads": 6}, "6 query heads cannot share 4 KV heads evenly"),
        ({"num_kv_heads": 0}, "8 query heads cannot share 0 KV heads evenly"),
    ],
)
def test_shape(fields, message):
    with pytest.raises(PlanError, match=message):
        validate(replace(balanced(), **fields))


def test_ranks_with_different_numbers_of_steps():
    plan = balanced()
    broken = replace(plan, steps=(plan.steps[0][:-1], *plan.steps[1:]))
    with pytest.raises(PlanError, match="every rank must have the same number of steps"):
        validate(broken)


# ---- every attending pair once, nothing masked ----------------------------------------------


def test_task_dropped():
    broken = change(balanced(), 1, 2, tasks=drop(0))
    expect(broken, "queries 8:16 × keys 0:8 × heads 0:2 are computed never, not once", 1, None)


def test_task_doubled():
    broken = change(balanced(), 1, 2, tasks=double(0))
    expect(broken, "queries 8:16 × keys 0:8 × heads 0:2 are computed 2 times, not once", 1, 2)


def test_heads_done_by_owner_and_helper():
    broken = change(balanced(), 2, 1, tasks=adjust(0, heads=Span(0, 3)))
    expect(broken, "queries 16:24 × keys 0:8 × heads 2:3 are computed 2 times, not once", 2, 1)


def test_rows_left_out():
    broken = change(balanced(), 1, 2, tasks=adjust(0, queries=Span(9, 16)))
    expect(broken, "queries 8:9 × keys 0:8 × heads 0:2 are computed never, not once", 1, None)


def test_mask_kind_that_masks_too_little():
    broken = change(balanced(), 3, 0, tasks=adjust(0, kind=MaskKind.FULL))
    expect(broken, "mask kind full is wrong for 24:32 × 24:32", 3, 0)


def test_mask_kind_that_masks_too_much():
    plan = build("ring", (8, 8), **HEADS, mask=Mask.full())
    broken = change(plan, 0, 1, tasks=adjust(0, kind=MaskKind.CAUSAL))
    expect(broken, "mask kind causal is wrong for 0:8 × 8:16", 0, 1)


def test_masked_work():
    broken = change(balanced(), 0, 3, tasks=add(_own_task(Span(0, 8), Span(8, 16))))
    expect(broken, "nothing attends in 0:1 × 8:16 of a task", 0, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keys": Span(0, 8)}, "nothing attends in 8:11 × 0:1 of a task"),
        ({"queries": Span(8, 16)}, "nothing attends in 15:16 × 5:8 of a task"),
    ],
)
def test_task_wider_than_its_mask(fields, message):
    expect(change(window(), 1, 1, tasks=adjust(0, **fields)), message, 1, 1)


def test_pairs_across_documents():
    """Every row and column of the task attends, but its first and second half not to each other."""
    broken = change(packed(), 0, 0, tasks=lambda tasks: _one_causal_task(tasks[0]))
    expect(broken, "computes masked pairs 4:8 × 0:4", 0, 0)


def _one_causal_task(task: Task) -> tuple[Task]:
    return (replace(task, queries=Span(0, 8), keys=Span(0, 8)),)


@pytest.mark.parametrize(
    ("queries", "keys", "heads"),
    [
        (Span(8, 8), Span(0, 8), ALL_HEADS),
        (Span(8, 16), Span(8, 5), ALL_HEADS),
        (Span(8, 16), Span(0, 8), Span(4, 4)),
    ],
)
def test_empty_task(queries, keys, heads):
    broken = change(balanced(), 1, 3, tasks=add(_own_task(queries, keys, heads)))
    expect(broken, f"task {queries} × {keys} × heads {heads} is empty", 1, 3)


def test_heads_that_do_not_exist():
    broken = change(balanced(), 1, 0, tasks=adjust(0, heads=Span(0, 5)))
    expect(broken, "KV heads 0:5 do not exist", 1, 0)


@pytest.mark.parametrize("name", ["queries", "keys"])
@pytest.mark.parametrize("tokens", [Span(4, 12), Span(28, 36), Span(40, 48)], ids=str)
def test_task_that_is_not_inside_one_chunk(name, tokens):
    broken = change(balanced(), 1, 0, tasks=adjust(0, **{name: tokens}))
    expect(broken, f"tokens {tokens} are not inside one chunk", 1, 0)


# ---- transfers have two sides -----------------------------------------------------------------

KV_0_TO_1 = "kv of tokens 0:8, KV heads 0:4, rank 0 to rank 1"


def test_receive_missing():
    broken = change(balanced(), 1, 1, receives=drop(0))
    expect(broken, f"the two sides disagree about {KV_0_TO_1}", 0, 1)


def test_send_missing():
    broken = change(balanced(), 0, 1, sends=drop(0))
    expect(broken, f"the two sides disagree about {KV_0_TO_1}", 0, 1)


def test_receive_posted_in_another_step():
    plan = balanced()
    moved = transfer_of(plan, 1, 0, 1)
    broken = change(change(plan, 1, 1, receives=drop(0)), 1, 0, receives=add(moved))
    expect(broken, f"the two sides disagree about {KV_0_TO_1}", 0, 0)


def test_transfers_in_another_order():
    broken = change(zigzag(), 0, 0, receives=reverse)
    message = "the two sides disagree about kv of tokens 4:8, KV heads 0:4, rank 1 to rank 0"
    expect(broken, f"{message} (missing or out of order)", 1, 0)


def test_sides_that_expect_different_tokens():
    broken = change(balanced(), 1, 1, receives=adjust(0, tokens=Span(0, 7)))
    expect(broken, f"the two sides disagree about {KV_0_TO_1}", 0, 1)


def test_send_of_another_rank():
    plan = balanced()
    broken = change(plan, 2, 1, sends=add(transfer_of(plan, 1, 0, 1)))
    expect(broken, f"sends {KV_0_TO_1}, which is rank 0's", 2, 1)


def test_receive_of_another_rank():
    plan = balanced()
    broken = change(plan, 2, 1, receives=add(transfer_of(plan, 1, 0, 1)))
    expect(broken, f"receives {KV_0_TO_1}, which is rank 1's", 2, 1)


@pytest.mark.parametrize("sides", [["sends"], ["receives"], ["sends", "receives"]], ids="+".join)
def test_transfer_to_itself(sides):
    loop = input_transfer(Payload.KEY_VALUE, Span(8, 16), ALL_HEADS, (1, 1), 7)
    broken = change(balanced(), 1, 1, **{side: add(loop) for side in sides})
    message = "sends kv of tokens 8:16, KV heads 0:4, rank 1 to rank 1 to itself"
    expect(broken, message, 1, 1)


# ---- buffers ----------------------------------------------------------------------------------


def test_buffers_that_grow_with_the_ranks():
    """Everything sent in the first step: what stock's all-gather does."""
    with pytest.raises(PlanError, match="kv slots hold 15.0 chunks, more than 10") as caught:
        build("ring", (4,) * 16, **HEADS, mask=Mask.full(), prefetch=16)
    assert "ring forward plan on rank 0:" in str(caught.value)


def test_buffers_may_be_as_large_as_the_limit():
    build("ring", (4,) * 16, **HEADS, mask=Mask.full(), prefetch=9)


# ---- the message ------------------------------------------------------------------------------


def test_message_shows_the_grid_with_the_culprit_marked():
    broken = change(balanced(), 1, 2, tasks=double(0))
    with pytest.raises(PlanError) as caught:
        validate(broken)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 + 4
    assert re.fullmatch(r"1 +q1·k1 +q3·k1\[h2:4\]\* +> q1·k0 q1·k0 +\. +\.", lines[3])
    assert sum(">" in line for line in lines) == 1


def test_message_of_a_large_plan_shows_one_rank():
    plan = build("balanced", (8,) * 17, **HEADS, mask=Mask.causal())
    with pytest.raises(PlanError) as caught:
        validate(change(plan, 5, 2, tasks=double(0)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[2].startswith("5 ")
