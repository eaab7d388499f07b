"""Plans as data: JSON, hashing, layouts, the printed grid, and what importing them needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from megatron_distflash.plan import (
    SCHEDULES,
    Mask,
    Plan,
    PlanError,
    build,
    build_backward,
    validate,
)
from megatron_distflash.plan.grid import format_grid
from megatron_distflash.plan.plan import contiguous, zigzag
from megatron_distflash.plan.spans import Span
from tests.plan.breaking import balanced
from tests.plan.cases import lengths, masks

ROOT = Path(__file__).resolve().parents[2]


# ---- JSON and hashing -------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("make", [build, build_backward])
def test_json_round_trip(schedule, make):
    plan = make(schedule, (5, 0, 7, 7), num_heads=6, num_kv_heads=2, mask=Mask.causal())
    again = Plan.from_json(plan.to_json())
    assert again == plan and again is not plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    validate(again)


@settings(max_examples=50, deadline=None)
@given(lengths(6, 8).flatmap(lambda ranks: masks(sum(ranks)).map(lambda mask: (ranks, mask))))
def test_json_round_trip_of_any_mask(case):
    ranks, mask = case
    plan = build("zigzag", ranks, num_heads=4, num_kv_heads=2, mask=mask)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "7", '"plan"', '{"schedule": 1}', balanced().to_json()[:-9]]
)
def test_text_that_is_no_plan(text):
    with pytest.raises(PlanError, match="not a plan's JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("direction", "sideways"),
        ("layout", [[0, 8]]),
        ("mask", {"left": -3, "right": 0, "documents": []}),
        ("steps", [[[[], [], []]]]),
        ("steps", [[[[], [], [], [[0]]]]]),
    ],
)
def test_json_with_a_broken_field(name, value):
    data = json.loads(balanced().to_json())
    with pytest.raises(PlanError, match="not a plan's JSON"):
        Plan.from_json(json.dumps(data | {name: value}))


def test_plans_are_cached_by_their_arguments():
    options = {"num_heads": 4, "num_kv_heads": 4, "mask": Mask.sliding_window(7)}
    assert build("ring", (8, 8), **options) is build("ring", (8, 8), **options)
    assert build_backward("ring", (8, 8), **options) is build_backward("ring", (8, 8), **options)
    other = options | {"mask": Mask.sliding_window(6)}
    assert len({build("ring", (8, 8), **options), build("ring", (8, 8), **other)}) == 2


# ---- layouts ----------------------------------------------------------------------------------


def test_contiguous_layout():
    layout = contiguous((3, 0, 4))
    assert (layout.num_tokens, layout.num_ranks) == (7, 3)
    assert [layout.rank_tokens(rank) for rank in range(3)] == [3, 0, 4]
    assert layout.owner(Span(2, 3)) == 0 and layout.owner(Span(3, 7)) == 2
    assert layout.local(Span(4, 6)) == Span(1, 3)


def test_zigzag_layout():
    layout = zigzag((4, 5))
    assert [(str(c.tokens), c.owner) for c in layout.chunks] == [
        ("0:2", 0),
        ("2:4", 1),
        ("4:7", 1),
        ("7:9", 0),
    ]
    assert layout.local(Span(7, 9)) == Span(2, 4)
    assert layout.local(Span(5, 7)) == Span(3, 5)


@given(lengths(8, 9))
def test_a_rank_holds_its_tokens_in_order(ranks):
    for layout in (contiguous(ranks), zigzag(ranks)):
        assert layout.num_tokens == sum(ranks)
        for rank, length in enumerate(ranks):
            spans = [chunk.tokens for chunk in layout.chunks_of(rank) if len(chunk.tokens)]
            places = [i for span in spans for i in range(*_ends(layout.local(span)))]
            assert places == list(range(length)) and layout.rank_tokens(rank) == length


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop


@pytest.mark.parametrize("tokens", [Span(2, 4), Span(3, 3), Span(6, 8), Span(9, 12)], ids=str)
def test_tokens_that_no_chunk_holds(tokens):
    with pytest.raises(PlanError, match=f"tokens {tokens} are not inside one chunk"):
        contiguous((3, 0, 4)).owner(tokens)


# ---- the grid ---------------------------------------------------------------------------------


def test_grid_names_parts_of_heads_and_rows():
    options = {"mask": Mask.causal(), "cut": False}
    by_heads = build("balanced", (8, 8), num_heads=4, num_kv_heads=4, **options)
    assert format_grid(by_heads).splitlines()[1:] == [
        "0     q0·k0   q1·k0[h2:4]*  ~       .",
        "1     q1·k1   q1·k0[h0:2]   ~       +",
    ]
    by_rows = build("balanced", (8, 8), num_heads=4, num_kv_heads=1, **options)
    assert format_grid(by_rows).splitlines()[1:] == [
        "0     q0·k0   q1(0:4)·k0*  ~       .",
        "1     q1·k1   q1(4:8)·k0   ~       +",
    ]


def test_grid_can_mark_a_cell_and_show_one_rank():
    lines = format_grid(balanced(), mark=(1, 2), only_rank=1).splitlines()
    assert lines == [
        "rank  step 0  step 1        step 2   step 3  step 4",
        "1     q1·k1   q3·k1[h2:4]*  > q1·k0  .       .",
    ]


# ---- imports ----------------------------------------------------------------------------------

BLOCKED_IMPORT = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "megatron")))  # None: importing them fails
import megatron_distflash.plan as plan
for module in pkgutil.iter_modules(plan.__path__, plan.__name__ + "."):
    importlib.import_module(module.name)
built = plan.build("balanced", (9, 9, 9), num_heads=4, num_kv_heads=2, mask=plan.Mask.causal())
print(plan.cost(built).critical_path)
"""


def test_the_plan_layer_needs_the_standard_library_only():
    command = [sys.executable, "-c", BLOCKED_IMPORT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("1.5\n", "")
