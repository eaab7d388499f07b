"""Costs against the formulas of a causal schedule with P equal chunks.

Work in blocks of n × n, volume in chunks of n tokens × query width; keys with values are 2g wide,
g = KV heads / query heads.
"""

from fractions import Fraction

import pytest
from hypothesis import given, settings

from megatron_distflash.plan import SCHEDULES, Mask, Plan, build, cost
from megatron_distflash.plan.cost import bytes_per_chunk, live_buffers, sent_per_rank, step_work
from tests.plan.breaking import balanced
from tests.plan.cases import attends, lengths, masks


def _causal(schedule: str, num_ranks: int, num_heads: int = 32, num_kv_heads: int = 8) -> Plan:
    lengths = (64,) * num_ranks
    return build(
        schedule, lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, mask=Mask.causal()
    )


@pytest.mark.parametrize("num_ranks", range(1, 65))
def test_balanced_has_no_idle_time(num_ranks):
    figures = cost(_causal("balanced", num_ranks))
    assert figures.idle_fraction == 0
    assert figures.critical_path == num_ranks / 2
    assert figures.steps == (num_ranks // 2 + 3 if num_ranks > 1 else 1)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_balanced_has_no_idle_time_where_heads_cannot_be_halved(num_ranks):
    figures = cost(_causal("balanced", num_ranks, num_heads=6, num_kv_heads=1))
    assert (figures.idle_fraction, figures.critical_path) == (0, num_ranks / 2)


@pytest.mark.parametrize(
    ("num_ranks", "ring", "paper"),
    [
        (1, (0.5, 0), (0.5, 0)),
        (2, (1.5, 0.33), (1.5, 0.33)),
        (4, (3.5, 0.43), (2.5, 0.20)),
        (7, (6.5, 0.46), (3.5, 0)),
        (8, (7.5, 0.47), (4.5, 0.11)),
        (16, (15.5, 0.48), (8.5, 0.06)),
    ],
)
def test_critical_path_and_idle_fraction(num_ranks, ring, paper):
    expected = {"ring": ring, "paper": paper, "zigzag": (num_ranks / 2, 0)}
    for schedule, (critical_path, idle_fraction) in expected.items():
        figures = cost(_causal(schedule, num_ranks))
        assert figures.critical_path == critical_path
        assert figures.idle_fraction == pytest.approx(idle_fraction, abs=0.005)


def _mean_volumes(schedule: str, num_ranks: int, g: Fraction) -> tuple[Fraction, Fraction]:
    """(forward, backward) chunks that a rank sends: every remote pair of chunks moves one input."""
    pairs = Fraction(num_ranks * (num_ranks - 1), 2)
    if schedule in ("ring", "zigzag"):
        # zigzag: of a pair of ranks, one needs half a chunk and the other one a whole one
        by_owner = pairs if schedule == "ring" else pairs * Fraction(3, 2)
        return by_owner * 2 * g / num_ranks, by_owner * 4 * g / num_ranks
    helped = sum(range(1, (num_ranks - 1) // 2 + 1))
    shared = Fraction(num_ranks, 2) if num_ranks % 2 == 0 and schedule == "balanced" else 0
    owned = pairs - helped - shared
    forward = owned * 2 * g + helped * 2 + shared * (g + 1)  # kv | q, out | half of each
    back = owned * 4 * g + helped * 3 + shared * (2 * g + Fraction(3, 2))  # kv, dkv | q, do, dq
    return forward / num_ranks, back / num_ranks


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (32, 4)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 9, 16])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_volumes(schedule, num_ranks, heads):
    figures = cost(_causal(schedule, num_ranks, *heads))
    forward, back = _mean_volumes(schedule, num_ranks, Fraction(heads[1], heads[0]))
    assert figures.volume_forward_mean == pytest.approx(float(forward), rel=1e-12)
    assert figures.volume_backward_mean == pytest.approx(float(back), rel=1e-12)


@pytest.mark.parametrize(
    ("g", "num_ranks", "ring", "balanced", "zigzag"),
    [
        ((8, 8), 8, (7.0, 14.0), (7.0, 13.0), (10.5, 21.0)),
        ((32, 8), 8, (1.75, 3.5), (3.25, 5.5), (2.625, 5.25)),
        ((32, 4), 8, (0.875, 1.75), (2.625, 4.25), (1.3125, 2.625)),
        ((32, 8), 16, (3.75, 7.5), (6.75, 11.5), (5.625, 11.25)),
    ],
)
def test_volumes_in_numbers(g, num_ranks, ring, balanced, zigzag):
    for schedule, expected in (("ring", ring), ("balanced", balanced), ("zigzag", zigzag)):
        figures = cost(_causal(schedule, num_ranks, *g))
        assert (figures.volume_forward_mean, figures.volume_backward_mean) == expected


def test_counts_of_a_plan_taken_by_hand():
    """The plan that ``breaking`` shows: rank 0 sends 2 × kv and 2 × out, and holds q and out."""
    figures = cost(balanced())
    assert (figures.steps, figures.tail_steps, figures.messages_forward_max) == (3, 2, 4)
    assert sent_per_rank(balanced()) == [3, Fraction(2), Fraction(3, 2), Fraction(3, 2)]
    assert (figures.volume_forward_max, figures.volume_forward_mean) == (3.0, 2.0)
    assert [live_buffers(balanced(), rank) for rank in range(4)] == [3, Fraction(2), 2, 3]
    assert figures.live_buffers_forward == 3.0


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_buffers_do_not_grow_with_the_ranks(schedule):
    small, large = cost(_causal(schedule, 16)), cost(_causal(schedule, 40))
    assert large.live_buffers_forward <= small.live_buffers_forward
    assert large.live_buffers_backward <= small.live_buffers_backward


@settings(max_examples=50, deadline=None)
@given(lengths(6, 8).flatmap(lambda ranks: masks(sum(ranks)).map(lambda mask: (ranks, mask))))
def test_work_is_what_attends(case):
    """All ranks' work together: the attending pairs, those on the band's right edge half."""
    ranks, mask = case
    plan = build("ring", ranks, num_heads=4, num_kv_heads=2, mask=mask)
    seen = attends(mask, sum(ranks))
    # A block that its mask does not cut counts whole, also where it touches the edge.
    most = Fraction(int(seen.sum()))
    least = most - Fraction(sum(ranks), 2)
    pairs = _total_work(plan) * Fraction(sum(ranks), len(ranks)) ** 2
    assert least <= pairs <= most


def _total_work(plan: Plan) -> Fraction:
    cells = [(rank, idx) for rank in range(plan.num_ranks) for idx in range(plan.num_steps)]
    return sum((step_work(plan, *cell) for cell in cells), Fraction(0))


def test_uneven_chunks():
    """1000 tokens over 3 ranks: everybody's keys go to the ranks after it."""
    plan = build("ring", (334, 333, 333), num_heads=8, num_kv_heads=2, mask=Mask.causal())
    n, width = Fraction(1000, 3), Fraction(1, 2)
    assert sent_per_rank(plan) == [2 * 334 / n * width, 333 / n * width, 0]
    assert _total_work(plan) == (Fraction(1000 * 1000, 2)) / n**2
    assert cost(plan).critical_path == float(
        (Fraction(334 * 334, 2) + 334 * 333 + 334 * 333) / n**2
    )


def test_one_rank_sends_nothing():
    figures = cost(_causal("balanced", 1))
    assert figures.critical_path == 0.5
    assert figures.volume_forward_max == figures.volume_backward_max == 0
    assert figures.messages_forward_max == figures.live_buffers_backward == 0


def test_bytes():
    plan = build("ring", (100, 50), num_heads=8, num_kv_heads=2, mask=Mask.causal())
    assert bytes_per_chunk(plan, head_dim=64, bytes_per_element=2) == 75 * 8 * 64 * 2


def test_dictionary_has_every_figure():
    figures = cost(_causal("paper", 4)).as_dict()
    assert figures["idle_fraction"] == 0.2 and figures["critical_path"] == 2.5
    assert {"steps", "volume_forward_mean", "volume_backward_mean"} <= figures.keys()
