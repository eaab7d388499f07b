"""Megatron-LM's own pretrain_gpt.py, unmodified, split over two ranks and not.

The checkouts are named by $MEGATRON_LM (paths with : between); without it these tests are skipped.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcore.harness import TINY_GPT

TRAINING = ["--transformer-impl", "local", "--mock-data", "--train-iters", "5"]
TRAINING += ["--log-interval", "1"]
SPLIT = ["--distflash-attn", "--context-parallel-size", "2"]


def losses(checkout: str, num_ranks: int, flags: list[str]) -> list[float]:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv += ["--nproc-per-node", str(num_ranks), "-m", "megatron_distflash.run"]
    argv += [str(Path(checkout) / "pretrain_gpt.py"), *TINY_GPT, *TRAINING, *flags]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [float(value) for value in re.findall(r"lm loss: (\S+)", result.stdout)]


@pytest.mark.parametrize("checkout", os.environ.get("MEGATRON_LM", "").split(":"))
def test_unmodified_script_has_the_same_losses_when_split(checkout: str) -> None:
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout")
    whole, split = losses(checkout, 1, []), losses(checkout, 2, SPLIT)
    # Iterations, then Megatron's own evaluations at the end.
    assert len(whole) == len(split) >= 5
    assert split == pytest.approx(whole, abs=1e-4)
