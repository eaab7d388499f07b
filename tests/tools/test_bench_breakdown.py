"""What a list of launches adds up to; the launches themselves need a GPU."""

import subprocess
import sys

import bench_breakdown
import pytest
import torch
from bench_breakdown import Breakdown, Launch


def test_kinds_and_gaps() -> None:
    breakdown = Breakdown(
        [
            Launch("void distflash::forward_kernel<bf16>", 10.0, 5.0),
            Launch("Memset (Device)", 17.0, 1.0),
            Launch("void distflash::forward_kernel<bf16>", 17.5, 4.0),  # beside the last one
            Launch("void distflash::merge_kernel<bf16>", 22.0, 2.0),
            Launch("who knows", 24.0, 1.0),
        ]
    )
    assert breakdown.whole_us == 15.0
    assert breakdown.gaps_us() == [0.0, 2.0, -0.5, 0.5, 0.0]
    assert breakdown.by_kind() == {
        "attention": (2, 9.0),
        "fill": (1, 1.0),
        "merge": (1, 2.0),
        "other": (1, 1.0),
        "gaps": (1, 2.5),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run(
        [sys.executable, bench_breakdown.__file__], capture_output=True, text=True, timeout=120
    )
    assert run.returncode and "Traceback" not in run.stderr and "GPU" in run.stderr
