"""tools/plan.py, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distflash.plan import Mask, Plan, PlanCost, build, build_backward, cost
from megatron_distflash.plan.grid import format_grid

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"num_heads": 32, "num_kv_heads": 8, "mask": Mask.causal()}


def _run(*arguments: str, blocked: Path | None = None) -> subprocess.CompletedProcess:
    """Run the tool; ``blocked`` is a folder of modules that fail to import."""
    env = os.environ | {"PYTHONPATH": str(blocked) if blocked else ""}
    command = [sys.executable, "tools/plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def _json(*arguments: str) -> dict:
    done = _run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _block(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / f"{name}.py").write_text("raise ImportError(__name__ + ' is blocked')\n")
    return folder


def test_prints_grid_and_figures():
    done = _run("--ranks", "4")
    plan = build("balanced", (8192,) * 4, **OPTIONS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("balanced forward: 4 ranks, 32,768 tokens, 32 query and 8 KV")
    assert format_grid(plan) in done.stdout
    for line in (
        "steps             5, and 1 to bring results home",
        "critical path     2 blocks of n × n (n = tokens per rank)",
        "idle              0.0% of the ranks' time",
        "exposed           0.0% at 1/8, 0.0% at 1/4, 11.1% at 1/2 blocks' time a chunk",
        "sent forward      1.5 chunks a rank (96 MiB), at most 2.25 (144 MiB)",
        "sent backward     2.5 chunks a rank (160 MiB), at most 3.75 (240 MiB)",
    ):
        assert line in done.stdout


def test_prints_the_backward_plan():
    done = _run("--ranks", "3", "--schedule", "zigzag", "--backward")
    assert "zigzag backward: 3 ranks" in done.stdout
    assert format_grid(build_backward("zigzag", (8192,) * 3, **OPTIONS)) in done.stdout


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 8, 64])
def test_json_of_balanced(num_ranks):
    report = _json("--ranks", str(num_ranks), "--schedule", "balanced")
    assert report["idle_fraction"] == 0
    assert report["critical_path"] == num_ranks / 2
    assert report["seq"] == 8192 * num_ranks
    assert set(PlanCost.__dataclass_fields__) <= report.keys()


def test_json_says_what_was_asked_for():
    report = _json(
        *("--ranks", "8", "--schedule", "ring", "--heads", "16", "--kv-heads", "16"),
        *("--seq", "65536", "--head-dim", "64"),
    )
    expected = {
        "ranks": 8,
        "schedule": "ring",
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "seq": 65536,
        "mask": "causal",
        "direction": "forward",
        "bf16_bytes_per_chunk": 8192 * 16 * 64 * 2,
        "steps": 8,
        "volume_forward_mean": 7.0,
        "volume_backward_mean": 14.0,
    }
    assert report == report | expected


def test_uneven_sequences_are_cut_as_evenly_as_can_be():
    report = _json("--ranks", "3", "--seq", "1000", "--full")
    plan = build("balanced", (334, 333, 333), **OPTIONS)
    assert Plan.from_json(json.dumps(report["plan"])) == plan
    assert report["idle_fraction"] == cost(plan).idle_fraction > 0


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("full", Mask.full()),
        ("window:40", Mask.sliding_window(40)),
        ("documents:100,28,72", Mask.packed((0, 100, 128, 200))),
    ],
)
def test_masks(text, mask):
    report = _json("--ranks", "2", "--schedule", "ring", "--seq", "200", "--mask", text, "--full")
    plan = build("ring", (100, 100), **OPTIONS | {"mask": mask})
    assert Plan.from_json(json.dumps(report["plan"])) == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give one of --ranks P, --validate FILE and --measured FILE"),
        ("--ranks 2 --measured t.json", "give one of --ranks P, --validate FILE and --measured"),
        ("--measured t.json --json", "--measured FILE goes with no other option than --png"),
        ("--measured no/such/trace.json", "No such file or directory: 'no/such/trace.json'"),
        ("--ranks 0", "--ranks must be at least 1"),
        ("--ranks many", "argument --ranks: invalid int value: 'many'"),
        ("--ranks 2 --seq 0", "--seq must be at least 1"),
        ("--ranks 2 --heads 6 --kv-heads 4", "6 query heads cannot share 4 KV heads evenly"),
        ("--ranks 2 --schedule spiral", "invalid choice: 'spiral'"),
        ("--ranks 2 --mask window:9", "'balanced' cannot balance a mask of kind 'sliding window'"),
        ("--ranks 2 --schedule ring --mask window:0", "window needs at least 1 token, got 0"),
        ("--ranks 2 --mask window", "unknown mask 'window'"),
        ("--ranks 2 --mask causal:3", "unknown mask 'causal:3'"),
        ("--ranks 2 --seq 9 --mask documents:4,4", "documents have 8 tokens, the sequence 9"),
        ("--ranks 2 --full", "--full does nothing without --json"),
        ("--ranks 2 --compare ring", "--compare does nothing without --png FILE"),
        ("--validate plan.json --json", "--validate FILE goes with no other option"),
        ("--validate no/such/plan.json", "No such file or directory: 'no/such/plan.json'"),
        ("--ranks 2 --png no/such/folder.png", "No such file or directory"),
        ("--ranks 2 --png plan.nonsense", "'nonsense' is not supported"),
        ("--ranks 2 --colour", "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    done = _run(*arguments.split())
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and done.stderr.startswith("plan.py: ")
    assert done.stderr.count("\n") == 1


# ---- --validate -------------------------------------------------------------------------------


def _report(tmp_path: Path, plan: Plan | dict) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json() if isinstance(plan, Plan) else json.dumps(plan))
    return path


def test_validates_what_it_printed(tmp_path):
    report = _json("--ranks", "3", "--full")
    done = _run("--validate", str(_report(tmp_path, report)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/plan.json: a valid balanced forward plan\n")
    assert format_grid(build("balanced", (8192,) * 3, **OPTIONS)) in done.stdout


def test_validates_a_bare_plan(tmp_path):
    plan = build_backward("ring", (5, 6), **OPTIONS)
    done = _run("--validate", str(_report(tmp_path, plan)))
    assert done.returncode == 0 and "a valid ring backward plan" in done.stdout


def test_shows_what_is_wrong_with_a_plan(tmp_path):
    data = json.loads(build("ring", (8, 8), **OPTIONS).to_json())
    data["steps"][1][1][3] *= 2  # rank 1, step 1: the tasks
    done = _run("--validate", str(_report(tmp_path, data)))
    assert done.returncode == 1 and done.stdout == ""
    assert "on rank 1 in step 1" in done.stderr and "computed 2 times" in done.stderr
    assert "> q1·k0 q1·k0" in done.stderr


@pytest.mark.parametrize("text", ["", "[1, 2]", "7", '{"plan": 3}', "{}"])
def test_file_without_a_plan(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    done = _run("--validate", str(path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{path} holds no plan as --json --full prints it" in done.stderr


# ---- --png ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "1"),
        ("--ranks", "8", "--compare", "ring"),
        ("--ranks", "4", "--schedule", "zigzag", "--backward"),
        ("--ranks", "3", "--schedule", "ring", "--mask", "window:3000"),
    ],
    ids=" ".join,
)
def test_draws_a_picture(tmp_path, arguments):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "plan.png"
    done = _run(*arguments, "--png", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    pixels = imread(path)
    height, width, _ = pixels.shape
    assert width > 1000 and height > 100
    colors = {
        tuple(color) for color in (pixels[::3, ::3, :3] * 255).round().astype(int).reshape(-1, 3)
    }
    assert (0x2F, 0x66, 0x90) in colors  # somebody's own diagonal


def test_only_pictures_need_matplotlib(tmp_path):
    blocked = _block(tmp_path, "matplotlib", "torch", "numpy")
    assert _run("--ranks", "2", blocked=blocked).returncode == 0
    done = _run("--ranks", "2", "--png", str(tmp_path / "plan.png"), blocked=blocked)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "plan.py: --png needs matplotlib, which is not installed: pip install matplotlib\n"
    )
