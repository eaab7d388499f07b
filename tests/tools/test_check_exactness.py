"""The exactness check: what it says about wrong options, and that nothing wrong passes."""

import subprocess
import sys
from pathlib import Path

import check_exactness
import pytest
import torch

from megatron_distflash.plan import Mask

SCRIPT = Path(check_exactness.__file__)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--heads", "8", "--kv-heads", "3"], "--heads 8 is no multiple of --kv-heads 3"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--window", "0"], "--window must be at least 1"),
        (["--kernel", "nope"], "invalid choice: 'nope'"),
    ],
)
def test_wrong_options(monkeypatch, capsys, options, sentence):
    monkeypatch.setattr(sys, "argv", ["check_exactness.py", *options])
    with pytest.raises(SystemExit):
        check_exactness.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert sentence in last


def test_what_attention_refuses_is_one_sentence():
    options = ["--tokens", "8", "--comm", "copy", "--dtype", "float32"]
    command = [sys.executable, str(SCRIPT), *options]
    environment = {"CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": "0", "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("check_exactness: rank 0 of the context-parallel")
    assert "Traceback" not in ran.stderr and "GPU memory" in ran.stderr


@pytest.mark.parametrize(
    ("dtype", "error", "good"),
    [
        (torch.float64, 1e-13, True),
        (torch.float64, 1e-11, False),
        (torch.bfloat16, 1.2, True),
        (torch.bfloat16, 1.4, False),
        (torch.float64, float("nan"), False),
        (torch.bfloat16, float("nan"), False),
    ],
)
def test_one_wrong_result_fails(dtype, error, good):
    errors = [0.0, 0.0, 0.0, error]
    own = [1.0, 1.0, 1.0, 1.0]
    failed = check_exactness._report("balanced", Mask.causal(), errors, own, dtype, rank=1)
    assert failed is not good
