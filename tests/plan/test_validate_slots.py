"""Broken plans and what ``validate`` says of them: when data moves, where it lies, who uses it."""

from dataclasses import replace

import pytest

from megatron_distflash.plan import Mask, Payload, build_backward
from megatron_distflash.plan.plan import Merge, Output
from megatron_distflash.plan.spans import Span
from tests.plan.breaking import (
    ALL_HEADS,
    OWN_STATE,
    PLAIN,
    add,
    adjust,
    balanced,
    balanced_backward,
    change,
    delay,
    double,
    drop,
    expect,
    input_transfer,
    insert,
    remake,
    remove,
    transfer_of,
    window,
    zigzag,
    zigzag_backward,
)

# ---- data arrives before it is used, slots are not reused early -------------------------------


def test_data_used_before_it_arrives():
    plan = balanced()
    broken = delay(plan, 1, transfer_of(plan, 1, 0, 1), later=2)
    message = "a task reads kv of tokens 0:8, KV heads 0:4 from slot 0 before it is there"
    expect(broken, message, 1, 2)


def test_data_that_never_arrives():
    plan = balanced()
    broken = remove(plan, 1, transfer_of(plan, 1, 0, 1))
    expect(
        broken, "a task reads kv of tokens 0:8, KV heads 0:4, but nothing was put into slot 0", 1, 2
    )


def test_result_merged_before_it_arrives():
    plan = balanced()
    (merge,) = plan.steps[2][3].merges
    broken = change(change(plan, 2, 3, merges=drop(0)), 2, 2, merges=add(merge))
    message = "merges out of tokens 16:24, KV heads 2:4 from slot 0 before it is there"
    expect(broken, message, 2, 2)


def test_result_sent_before_it_is_computed():
    plan = balanced()
    broken = delay(plan, 2, transfer_of(plan, 2, 0, 2), later=1)
    message = "sends out of tokens 16:24, KV heads 2:4, rank 0 to rank 2, but nothing was put"
    expect(broken, message, 0, 1)


def test_slot_refilled_before_it_is_read():
    """Rank 3's second kv, in slot 1, lands while the first one is being read."""
    plan = balanced()
    broken = remake(plan, 1, transfer_of(plan, 1, 2, 3), target_slot=0)
    broken = change(broken, 3, 2, tasks=adjust(0, key_value_slot=0))
    message = "kv of tokens 8:16, KV heads 0:2 in slot 0 was sent, but is not used whole"
    expect(broken, f"{message} before the slot is reused", 3, 1)


def test_slot_filled_twice_in_one_step():
    plan = zigzag()
    second = transfer_of(plan, 0, 1, 0, idx=1)
    broken = remake(plan, 0, second, target_slot=0)
    message = "kv slot 0 is reused while its tokens 4:8 are in use"
    expect(change(broken, 0, 1, tasks=adjust(1, key_value_slot=0)), message, 0, 0)


def test_slot_overwritten_while_it_is_sent():
    plan = balanced()
    broken = change(plan, 0, 2, tasks=adjust(0, outputs=(Output(Payload.PARTIAL, 0, False),)))
    broken = remake(broken, 3, transfer_of(plan, 3, 0, 3), source_slot=0)
    expect(broken, "out slot 0 is reused while its tokens 16:24 are in use", 0, 2)


def test_slot_overwritten_while_it_is_merged():
    plan = build_backward("ring", (8,) * 5, **PLAIN, mask=Mask.full())
    (merge,) = plan.steps[0][3].merges
    outputs = (Output(Payload.DQ, None, True), Output(Payload.DKV, merge.slot, False))
    broken = change(plan, 0, 3, tasks=adjust(0, outputs=outputs))
    expect(broken, f"dkv slot {merge.slot} is reused while its tokens 0:8 are in use", 0, 3)


# ---- what tasks read and write ----------------------------------------------------------------


def test_task_reads_tokens_it_does_not_own_as_its_own():
    broken = change(balanced(), 0, 1, tasks=adjust(0, query_slot=None))
    expect(broken, "a task reads q of tokens 16:24 as its own", 0, 1)


def test_task_reads_the_wrong_slot():
    broken = change(balanced(), 2, 2, tasks=adjust(0, key_value_slot=0))
    message = "a task reads kv of tokens 8:16, KV heads 0:4, but slot 0 holds tokens 0:8"
    expect(broken, message, 2, 2)


def test_task_reads_tokens_past_its_slot():
    plan = balanced()
    broken = remake(plan, 1, transfer_of(plan, 1, 0, 1), tokens=Span(0, 7))
    message = "a task reads kv of tokens 0:8, KV heads 0:4, but slot 0 holds tokens 0:7"
    expect(broken, message, 1, 2)


def test_task_reads_heads_past_its_slot():
    plan = balanced()
    broken = remake(plan, 1, transfer_of(plan, 1, 0, 1), heads=Span(0, 3))
    message = "KV heads 0:4, but slot 0 holds tokens 0:8, KV heads 0:3"
    expect(broken, message, 1, 2)


def test_merge_from_a_slot_that_was_never_filled():
    broken = change(
        balanced(), 2, 4, merges=add(Merge(Payload.PARTIAL, Span(16, 24), ALL_HEADS, 9))
    )
    expect(
        broken, "merges out of tokens 16:24, KV heads 0:4, but nothing was put into slot 9", 2, 4
    )


@pytest.mark.parametrize(
    ("plan", "outputs", "wanted"),
    [
        (balanced, (), "out"),
        (balanced, OWN_STATE * 2, "out"),
        (balanced_backward, (Output(Payload.DQ, None, True),), "dq, dkv"),
    ],
)
def test_task_with_the_wrong_outputs(plan, outputs, wanted):
    broken = change(plan(), 1, 0, tasks=adjust(0, outputs=outputs))
    expect(broken, f"task 8:16 × 8:16 must have the outputs {wanted}", 1, 0)


def test_helper_keeps_the_result():
    broken = change(balanced(), 0, 1, tasks=adjust(0, outputs=OWN_STATE))
    expect(broken, "a task adds out of tokens 16:24 to its own state", 0, 1)


def test_task_overwrites_the_state_of_its_rank():
    outputs = (Output(Payload.PARTIAL, None, False),)
    broken = change(balanced(), 1, 2, tasks=adjust(0, outputs=outputs))
    expect(broken, "a task overwrites out of tokens 8:16, its own state", 1, 2)


def test_sum_without_a_first_term():
    outputs = (Output(Payload.PARTIAL, 0, True),)
    broken = change(balanced(), 0, 1, tasks=adjust(0, outputs=outputs))
    expect(broken, "adds out of tokens 16:24, KV heads 2:4 to slot 0, which has no such sum", 0, 1)


def test_sum_over_other_tokens():
    outputs = (Output(Payload.DQ, None, True), Output(Payload.DKV, 0, True))
    broken = change(zigzag_backward(), 0, 1, tasks=adjust(1, outputs=outputs))
    expect(broken, "adds dkv of tokens 8:12, KV heads 0:4 to slot 0, which has no such sum", 0, 1)


def test_sum_over_other_heads():
    """Rank 1's first block is cut by heads; the second half is added to the first half's slot."""
    first = adjust(0, heads=Span(0, 2))
    outputs = (Output(Payload.DQ, None, True), Output(Payload.DKV, 0, True))

    def cut(tasks: tuple) -> tuple:
        second = replace(tasks[0], heads=Span(2, 4), outputs=outputs)
        return (*first(tasks)[:1], second, *tasks[1:])

    broken = change(zigzag_backward(), 1, 1, tasks=cut)
    expect(broken, "adds dkv of tokens 0:4, KV heads 2:4 to slot 0, which has no such sum", 1, 1)


def test_sum_that_goes_on_after_it_was_sent():
    plan = zigzag_backward()
    late = plan.steps[1][1].tasks[1]
    broken = change(change(plan, 1, 1, tasks=drop(1)), 1, 2, tasks=add(late))
    expect(broken, "adds dkv of tokens 0:4, KV heads 0:4 to slot 0, which has no such sum", 1, 2)


def test_sum_into_a_received_result():
    plan = zigzag_backward()
    outputs = (Output(Payload.DQ, None, True), Output(Payload.DKV, 2, True))
    late = replace(plan.steps[0][0].tasks[1], outputs=outputs)
    broken = change(change(plan, 0, 0, tasks=drop(1)), 0, 2, tasks=add(late))
    expect(broken, "adds dkv of tokens 0:4, KV heads 0:4 to slot 2, which has no such sum", 0, 2)


# ---- every transfer is of use, every result gets home once ------------------------------------


def test_transfer_that_nobody_uses():
    extra = input_transfer(Payload.KEY_VALUE, Span(0, 8), ALL_HEADS, (0, 3), 5)
    broken = insert(balanced(), 1, extra)
    message = "kv of tokens 0:8, KV heads 0:4 in slot 5 was sent, but is not used whole"
    expect(broken, message, 3, 4)


def test_transfer_of_tokens_that_nobody_uses():
    plan = window()
    broken = remake(plan, 0, transfer_of(plan, 0, 0, 1), tokens=Span(4, 8))
    expect(broken, "kv of tokens 4:8, KV heads 0:4 in slot 0 was sent, but is not used whole", 1, 1)


@pytest.mark.parametrize("heads", [Span(0, 4), Span(0, 3)], ids=str)
def test_transfer_of_heads_that_nobody_uses(heads):
    plan = balanced()
    broken = remake(plan, 0, transfer_of(plan, 0, 0, 2), heads=heads)
    message = f"kv of tokens 0:8, KV heads {heads} in slot 0 was sent, but is not used whole"
    expect(broken, message, 2, 4)


def test_transfer_of_nothing():
    nothing = input_transfer(Payload.KEY_VALUE, Span(0, 8), Span(2, 2), (0, 3), 5)
    broken = insert(balanced(), 1, nothing)
    expect(broken, "kv of tokens 0:8, KV heads 2:2 in slot 5 was sent, but is not used whole", 3, 4)


def test_sender_without_the_tokens():
    plan = balanced()
    broken = remake(plan, 0, transfer_of(plan, 0, 0, 2), source=1)
    message = "has no kv of tokens 0:8, KV heads 0:2, rank 1 to rank 2 of its own to send"
    expect(broken, message, 1, 0)


def test_sender_without_tokens_that_exist():
    plan = balanced()
    broken = remake(plan, 0, transfer_of(plan, 0, 0, 2), tokens=Span(0, 9))
    expect(broken, "tokens 0:9 are not inside one chunk", 0, 0)


def test_result_sent_from_own_tensors():
    plan = balanced()
    broken = remake(plan, 2, transfer_of(plan, 2, 0, 2), source_slot=None)
    message = "has no out of tokens 16:24, KV heads 2:4, rank 0 to rank 2 of its own to send"
    expect(broken, message, 0, 2)


def test_result_sent_away_by_the_rank_that_owns_its_tokens():
    away = input_transfer(Payload.PARTIAL, Span(0, 8), ALL_HEADS, (0, 2), 9)
    message = "has no out of tokens 0:8, KV heads 0:4, rank 0 to rank 2 of its own to send"
    expect(insert(balanced(), 3, away), message, 0, 3)


def test_input_passed_on():
    """Inputs come from their owner, not from a rank that was sent them."""
    plan = balanced()
    passed_on = replace(
        transfer_of(plan, 1, 0, 1), source=1, target=3, source_slot=0, target_slot=6
    )
    broken = insert(plan, 2, passed_on)
    expect(broken, "slot 0 does not hold the result kv of tokens 0:8, KV heads 0:4", 1, 2)


def test_result_sent_from_the_wrong_slot():
    plan = balanced()
    broken = remake(plan, 3, transfer_of(plan, 3, 0, 3), source_slot=0)
    expect(broken, "slot 0 does not hold the result out of tokens 24:32, KV heads 0:4", 0, 3)


def test_result_not_sent():
    plan = balanced()
    broken = change(plan, 2, 3, merges=drop(0))
    broken = remove(broken, 2, transfer_of(plan, 2, 0, 2))
    expect(broken, "out of tokens 16:24, KV heads 2:4 in slot 0 is sent 0 times, not once", 0, 4)


def test_result_sent_twice():
    plan = balanced()
    again = replace(transfer_of(plan, 2, 0, 2), target_slot=5)
    broken = change(insert(plan, 3, again), 2, 4, merges=add(_merge_of(again)))
    expect(broken, "out of tokens 16:24, KV heads 2:4 in slot 0 is sent 2 times, not once", 0, 4)


def _merge_of(transfer) -> Merge:
    return Merge(transfer.payload, transfer.tokens, transfer.heads, transfer.target_slot)


def test_result_not_merged():
    broken = change(balanced(), 2, 3, merges=drop(0))
    expect(broken, "out of tokens 16:24, KV heads 2:4 in slot 0 is merged 0 times, not once", 2, 4)


def test_result_merged_twice():
    broken = change(balanced(), 2, 3, merges=double(0))
    expect(broken, "out of tokens 16:24, KV heads 2:4 in slot 0 is merged 2 times, not once", 2, 4)


def test_gradient_not_merged():
    broken = change(balanced_backward(), 0, 4, merges=drop(0))
    expect(broken, "dkv of tokens 0:8, KV heads 0:4 in slot 1 is merged 0 times, not once", 0, 4)


def test_result_overwritten_before_it_is_sent():
    """Rank 0's two results share a slot; the first one never leaves it."""
    plan = balanced()
    broken = remove(plan, 2, transfer_of(plan, 2, 0, 2))
    broken = change(broken, 2, 3, merges=drop(0))
    broken = change(broken, 0, 2, tasks=adjust(0, outputs=(Output(Payload.PARTIAL, 0, False),)))
    broken = remake(broken, 3, transfer_of(plan, 3, 0, 3), source_slot=0)
    message = "out of tokens 16:24, KV heads 2:4 in slot 0 is sent 0 times, not once"
    expect(broken, f"{message} before the slot is reused", 0, 2)


def test_result_sent_to_a_rank_that_does_not_own_it():
    plan = balanced()
    strayed = replace(transfer_of(plan, 2, 0, 2), target=1, target_slot=5)
    broken = insert(remove(plan, 2, transfer_of(plan, 2, 0, 2)), 2, strayed)
    broken = change(change(broken, 2, 3, merges=drop(0)), 1, 3, merges=add(_merge_of(strayed)))
    expect(broken, "merges out of tokens 16:24, KV heads 2:4, which it does not own", 1, 3)


def test_input_merged():
    merge = Merge(Payload.KEY_VALUE, Span(16, 24), ALL_HEADS, 0)
    broken = change(balanced(), 2, 1, merges=add(merge))
    expect(broken, "merges kv of tokens 16:24, KV heads 0:4, which it does not own", 2, 1)


@pytest.mark.parametrize("fields", [{"heads": Span(0, 4)}, {"tokens": Span(24, 31)}], ids=str)
def test_merge_of_something_else(fields):
    broken = change(balanced(), 3, 3, merges=adjust(0, **fields))
    expect(broken, "but slot 0 holds tokens 24:32, KV heads 2:4", 3, 3)


def test_merge_of_an_own_result():
    """A result in a slot was computed for another rank; the owner's copy must have travelled."""
    plan = balanced()
    outputs = (Output(Payload.PARTIAL, 4, False),)
    broken = change(plan, 1, 2, tasks=adjust(0, outputs=outputs))
    own = Merge(Payload.PARTIAL, Span(8, 16), ALL_HEADS, 4)
    broken = change(broken, 1, 3, merges=add(own))
    expect(broken, "merges out of tokens 8:16, KV heads 0:4, but slot 4 holds tokens 8:16", 1, 3)
