"""Launch scripts in examples/: every flag they pass is one that Megatron or distflash knows."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def launched(script: Path, tmp_path: Path, **variables: str) -> list[str]:
    """The arguments that a script gives torchrun, taken down by a torchrun of our own."""
    recorder = tmp_path / "torchrun"
    recorder.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    recorder.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"} | variables
    result = subprocess.run(
        [script, "--train-iters", "10"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize(("tensor", "context"), [("1", 8), ("2", 4)])
def test_flags_of_the_llama_script_are_known(tmp_path, tensor, context):
    from megatron.training.arguments import add_megatron_arguments

    from megatron_distflash.config import add_flags

    argv = launched(EXAMPLES / "train_llama3_8b.sh", tmp_path, DATA="d", TOKENIZER="t", TP=tensor)
    script_idx = argv.index("megatron_distflash.run") + 1
    assert argv[script_idx] == "examples/pretrain_gpt.py"
    parser = add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args = parser.parse_args(argv[script_idx + 1 :])  # exits on a flag that nobody knows
    assert args.distflash_attn
    assert args.context_parallel_size == context
    assert args.sequence_parallel == (tensor == "2")
    assert args.train_iters == 10  # what follows the script wins


def test_the_llama_script_asks_for_its_data(tmp_path):
    script = EXAMPLES / "train_llama3_8b.sh"
    result = subprocess.run([script], env={"PATH": os.environ["PATH"]}, capture_output=True)
    assert result.returncode != 0
    assert b"DATA: the --output-prefix" in result.stderr
