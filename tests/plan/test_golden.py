"""The grids of small plans, kept as text so that a change of a schedule shows in its diff.

Write them anew, then read the diff:

    WRITE_GOLDEN=1 python -m pytest tests/plan/test_golden.py
"""

import os
from pathlib import Path

import pytest

from megatron_distflash.plan import Mask, build, build_backward
from megatron_distflash.plan.grid import format_grid

FOLDER = Path(__file__).parent / "golden"
CASES = [
    *(("balanced", num_ranks) for num_ranks in range(1, 9)),
    *(("paper", num_ranks) for num_ranks in range(1, 9)),
    ("ring", 4),
    ("zigzag", 4),
]


def _text(schedule: str, num_ranks: int) -> str:
    options = {"num_heads": 32, "num_kv_heads": 8, "mask": Mask.causal()}
    lengths = (64,) * num_ranks
    forward, backward = (
        format_grid(make(schedule, lengths, **options)) for make in (build, build_backward)
    )
    return f"forward\n{forward}\n\nbackward\n{backward}\n"


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_grid(schedule, num_ranks):
    path = FOLDER / f"{schedule}_p{num_ranks}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(_text(schedule, num_ranks), encoding="utf-8")
    assert _text(schedule, num_ranks) == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == {f"{s}_p{p}.txt" for s, p in CASES}
