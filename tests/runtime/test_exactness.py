"""``dist_flash_attention`` against plain attention, in float64: output, LSE and all gradients.

What remains is the rounding of float64, sums of some hundred terms of size 1 in another order:
1e-13 or so. A wrong mask, a lost block or a doubled one is off by 0.01 and more.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_distflash.plan import SCHEDULES
from tests.plan import cases as plan_cases
from tests.runtime.ranks import Case, attend, attend_on_rank, check

RANKS = (1, 2, 3, 4, 5, 8)
UNBALANCED = ("ring", "zigzag")  # the schedules that take every mask
# MHA, GQA, MQA; KV heads that halve (shared by heads) and that do not (shared by rows)
HEADS = [(2, 2), (3, 3), (8, 2), (6, 3), (4, 1)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_ranks", RANKS)
def test_even_chunks(ranks, seed, num_ranks, schedule, causal):
    heads = HEADS[(num_ranks + seed) % len(HEADS)]
    case = Case(seed, (12,) * num_ranks, heads, schedule, causal, batch=1 + seed % 2)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_ranks", [4, 5])
def test_head_counts(ranks, seed, num_ranks, heads):
    case = Case(seed, (9,) * num_ranks, heads, batch=2)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(
    "lengths",
    [(7, 1, 12), (1, 1), (0, 5, 9, 2), (8, 0, 0, 3), (1, 0, 1, 30, 1), (5, 4, 3, 2, 1, 0, 1, 2)],
    ids=str,
)
def test_uneven_chunks(ranks, seed, lengths, schedule):
    case = Case(seed, lengths, (6, 2), schedule, causal=seed % 4 > 0, batch=2)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_1000_tokens_over_3_ranks(ranks, seed, schedule):
    case = Case(seed, (334, 333, 333), (2, 1), schedule)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("window", [None, 6], ids=["causal", "window"])
def test_auto_takes_a_schedule_that_balances_the_mask(ranks, seed, window):
    case = Case(seed, (9, 8, 11), (4, 2), "auto", window=window)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("schedule", UNBALANCED)
@pytest.mark.parametrize("window", [1, 5, 8, 23, 1000])
def test_sliding_window(ranks, seed, window, schedule):
    case = Case(seed, (8, 8, 11, 5), (4, 2), schedule, window=window)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("schedule", UNBALANCED)
@pytest.mark.parametrize("documents", [(0, 32), (0, 1, 16, 32), (0, 3, 7, 8, 20, 31, 32)], ids=str)
def test_packed_documents(ranks, seed, documents, schedule, causal):
    case = Case(seed, (8,) * 4, (4, 2), schedule, causal, documents=documents, batch=2)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("schedule", UNBALANCED)
def test_window_inside_documents(ranks, seed, schedule):
    case = Case(seed, (9, 10, 13), (2, 2), schedule, window=4, documents=(0, 11, 13, 32))
    check(case, attend(ranks, case))


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_softmax_scale(ranks, seed, scale):
    case = Case(seed, (8,) * 3, scale=scale)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("head_dim", [1, 3, 16, 80, 192])
def test_head_dims(ranks, seed, head_dim):
    case = Case(seed, (6,) * 2, (2, 2), head_dim=head_dim)
    check(case, attend(ranks, case))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_one_rank_without_a_group(seed, schedule, window):
    """Nothing to balance: every schedule takes every mask."""
    case = Case(seed, (37,), (4, 2), schedule, window=window, documents=(0, 20, 37), batch=2)
    check(case, attend_on_rank(0, None, case))


@st.composite
def attention_cases(draw) -> Case:
    """Any shape and mask that a schedule takes."""
    lengths = draw(plan_cases.lengths(max_ranks=8, max_tokens=14))
    schedule = draw(plan_cases.schedules)
    num_tokens = sum(lengths)
    windows = st.integers(1, num_tokens + 1)
    documents = plan_cases.documents(num_tokens)
    if schedule not in UNBALANCED and len(lengths) > 1:  # only masks that hide nothing more
        windows, documents = st.just(max(2, num_tokens)), st.just((0, num_tokens))
    causal = draw(st.booleans())
    return Case(
        draw(st.integers(0, 2**32 - 1)),
        lengths,
        draw(plan_cases.heads),
        schedule,
        causal,
        draw(st.none() | windows) if causal else None,
        draw(st.just(()) | documents),
        batch=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 5, 8])),
    )


@settings(
    max_examples=100,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=attention_cases())
def test_any_shape(ranks, case):
    check(case, attend(ranks, case))
