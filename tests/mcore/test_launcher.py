"""``distflash-run`` on scripts that know nothing of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_distflash import run
from tests.mcore.harness import TINY_GPT, RankPool

REPOSITORY = Path(__file__).parents[2]
GPT = [*TINY_GPT, "--eval-interval", "1000", "--train-iters", "2"]

# As stock pretrain scripts do it: functions imported by name, a helper beside the script.
SCRIPT = """
import json, sys
from types import SimpleNamespace

from helper_beside_the_script import ANSWER
from megatron.core import utils
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from tests.mcore import toy_gpt

assert ANSWER == 42
out = sys.argv.pop(1)
if __name__ == "__main__":
    toy_gpt.megatron_utils = SimpleNamespace(
        get_batch_on_this_tp_rank=get_batch_on_this_tp_rank,
        get_batch_on_this_cp_rank=get_batch_on_this_cp_rank,
        get_attr_wrapped_model=utils.get_attr_wrapped_model,
    )
    records = toy_gpt.run(sys.argv[1:], 0)
    with open(out, "w") as file:
        json.dump(records, file)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside_the_script.py").write_text("ANSWER = 42\n")
    path = tmp_path / "pretrain_by_name.py"
    path.write_text(SCRIPT)
    return path


@contextlib.contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undo what a launcher does to its process, which normally ends with the script."""
    from megatron_distflash.mcore.arguments import unregister_arguments
    from megatron_distflash.mcore.install import uninstall
    from tests.mcore import toy_gpt

    argv, path, utils = sys.argv, list(sys.path), toy_gpt.megatron_utils
    try:
        yield
    finally:
        sys.argv, sys.path[:], toy_gpt.megatron_utils = argv, path, utils
        sys.modules.pop("helper_beside_the_script", None)
        uninstall()
        unregister_arguments()


def launch_case(rank: int, world: int, script: str, flags: list[str]) -> list[Any]:
    out = Path(script).with_name(f"rank{rank}.json")
    with process_as_it_was():
        run.main([script, str(out), *flags])
    return json.loads(out.read_text())


def assert_same(ours: list[Any], stock: list[Any]) -> None:
    assert len(ours) == len(stock) == 2
    for mine, reference in zip(ours, stock, strict=True):
        assert mine == pytest.approx(reference, rel=0, abs=1e-4)


@pytest.mark.parametrize("schedule", ["balanced", "auto"])
def test_script_that_imports_by_name(rank_pool: RankPool, script: Path, schedule: str) -> None:
    """In the ranks of the pool, where Megatron is imported already."""
    (stock,) = rank_pool.run(launch_case, str(script), GPT, world=1)
    flags = [*GPT, "--distflash-attn", "--context-parallel-size", "2"]
    flags += ["--distflash-schedule", schedule]
    ours = rank_pool.run(launch_case, str(script), flags, world=2)
    assert_same(ours[-1], stock)


def test_fresh_processes(rank_pool: RankPool, script: Path) -> None:
    """As torchrun starts it, with ``-m``."""
    (stock,) = rank_pool.run(launch_case, str(script), GPT, world=1)
    flags = [*GPT, "--distflash-attn", "--context-parallel-size", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_distflash.run", str(script), str(script.with_name("out.json"))]
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Megatron runs on CPU ranks" in done.stdout + done.stderr
    assert_same(json.loads(script.with_name("out.json").read_text()), stock)


def test_a_checkouts_megatron_wins(tmp_path: Path) -> None:
    """The script's folder comes first on the path, before anything of Megatron is loaded."""
    for part in ("core", "training"):
        package = tmp_path / "megatron" / part
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    script = tmp_path / "pretrain.py"
    script.write_text("print('script ran')\n")
    check = f"""
import sys
from importlib.util import find_spec
from megatron_distflash import run

def prepare(options):
    assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
    for part in ("core", "training"):
        assert find_spec("megatron." + part).origin.startswith({str(tmp_path)!r})

run._prepare_megatron = prepare
run.main([{str(script)!r}])
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "script ran\n"


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        run.main(list(argv))
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_usage_errors(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert "SCRIPT.py" in usage_error(capsys)
    assert "there is no script nowhere.py" in usage_error(capsys, "nowhere.py", "--lr", "1")
    assert "there is no script" in usage_error(capsys, str(script.parent))
    assert "--distflash-schedule does nothing by itself" in usage_error(
        capsys, str(script), "--distflash-schedule", "ring"
    )
    assert "invalid choice: 'fast'" in usage_error(
        capsys, str(script), "--distflash-attn", "--distflash-schedule", "fast"
    )


def refused_case(rank: int, world: int, script: str, flags: list[str]) -> str:
    """What a script's user reads."""
    err = io.StringIO()
    with (
        process_as_it_was(),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit_info,
    ):
        run.main([script, "out.json", *flags])
    assert exit_info.value.code == 2
    return err.getvalue()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--attention-dropout 0.1", "--attention-dropout"),
        ("--distflash-schedule auto --seq-length", "auto needs --seq-length"),
    ],
)
def test_refusals_are_usage_errors(
    rank_pool: RankPool, script: Path, flags: str, wanted: str
) -> None:
    given = [*GPT, "--distflash-attn", *flags.split()]
    if flags.endswith("--seq-length"):
        at = given.index("--seq-length")
        given = [*given[:at], *given[at + 2 : -1]]
    (text,) = rank_pool.run(refused_case, str(script), given, world=1)
    assert "distflash-run: error: " in text and wanted in text.split("error: ")[1]
    assert "Traceback" not in text


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: distflash-run") and "torchrun" in text


def helpers_case(rank: int, world: int) -> list[str]:
    """What ``compile_helpers`` runs, with and without helpers that can be imported."""
    from megatron.core.datasets import utils

    from megatron_distflash.mcore import dataset_helpers

    ran = []
    with mock.patch.object(utils, "compile_helpers", lambda: ran.append("make")):
        dataset_helpers.build_only_where_missing()
        utils.compile_helpers()
        assert not ran  # The wheel's are compiled.
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            mock.patch.dict(os.environ),
        ):
            utils.compile_helpers()
            assert os.environ["PATH"].startswith(os.path.dirname(sys.executable))
    return ran


def test_helpers_are_compiled_only_where_they_are_missing(rank_pool: RankPool) -> None:
    assert rank_pool.run(helpers_case, world=1) == [["make"]]
