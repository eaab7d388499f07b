"""``auto`` for the schedule: what the simple machine says is fastest."""

import pytest

from megatron_distflash.plan import Mask, PlanError
from megatron_distflash.plan.choice import ANY_LAYOUT, choose_schedule, chunk_time_of

LENGTHS = (512,) * 8


def choose(mask=None, heads=(32, 8), lengths=LENGTHS, **options):
    num_heads, num_kv_heads = heads
    return choose_schedule(
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mask=mask or Mask.causal(),
        **options,
    )


def test_on_a_fast_link_the_contiguous_balanced_schedule_is_taken():
    assert choose(chunk_time=0.05, among=ANY_LAYOUT) == "balanced"


def test_on_a_slow_link_few_kv_heads_are_cheaper_to_send_than_queries():
    slow = {"chunk_time": 1.0, "among": ANY_LAYOUT}
    assert choose(heads=(64, 4), **slow) == "zigzag"


def test_where_sending_is_all_that_counts_the_least_is_sent():
    """Such as short chunks between nodes."""
    slowest = {"chunk_time": 20.0, "heads": (32, 8)}
    assert choose(**slowest, among=ANY_LAYOUT) == "ring"
    assert choose(**slowest) == "ring"


def test_without_helpers_only_where_there_is_nothing_to_help_with():
    assert choose() == "balanced"
    assert choose(lengths=(512,)) == "balanced"
    assert choose(Mask(left=99, right=0)) == "ring"  # balanced refuses bands


def test_the_first_of_equals_is_taken():
    assert choose(Mask.full(), among=("ring", "balanced")) == "ring"
    assert choose(Mask.full(), among=("balanced", "ring")) == "balanced"


def test_no_candidate_says_why():
    with pytest.raises(PlanError, match="cannot balance a mask"):
        choose(Mask(left=99, right=0), among=("balanced",))


def test_chunk_time_is_transfer_time_over_block_time():
    tokens, width, link, rate = 8192, 4096, 450e9, 600e12
    transfer_s = 2 * tokens * width / link
    block_s = 4 * tokens**2 * width / rate
    assert chunk_time_of(tokens, link_bytes_s=link, flops=rate) == pytest.approx(
        transfer_s / block_s
    )
