"""The attention benchmark: what it asks, checks, keeps and reports; tiny real runs on CPU ranks."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_node
import bench_node_all
import bench_node_attention
import pytest
from bench_node_attention import AttentionBench, median_ms, slowest_rank
from bench_node_cells import Cell, Column, cells, columns
from bench_node_report import Measured, plot, table
from bench_ranks import Node, RanksFailed
from plan_trace import read_trace

CELL = Cell(4, 8192, 32, 8)
BOUND = Column("alone", kernel="cudnn")
STOCK = Column("te", schedule="p2p")
OURS = Column("ours", "balanced", "nccl", "cudnn")
UNMOVED = Column("ours", "balanced", "none", "cudnn")
TRANSFERS = Column("ours", "balanced", "nccl", "none")
COLUMNS = [BOUND, STOCK, OURS, UNMOVED, TRANSFERS]


class FakeRanks:
    """Ranks whose columns take fixed times; counts what they are asked."""

    asked: list[tuple[int, str, str]] = []
    forward_ms: dict[str, float] = {}
    failing: dict[str, str] = {}  # column: at which request
    fatal: set[str] = set()
    wrong = ""

    def __init__(self, command: list[str], environments: list[Any], timeout_s: float) -> None:
        self.num_ranks = len(environments)

    def wait_ready(self) -> None:
        pass

    def ask(self, request: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        return [self._answer(rank, request) for rank in range(self.num_ranks)]

    def ask_each(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._answer(rank, request) for rank, request in enumerate(requests)]

    def _answer(self, rank: int, request: dict[str, Any]) -> dict[str, Any]:
        what, column = request["do"], request.get("column", "")
        self.asked.append((self.num_ranks, what, column))
        if self.wrong == column and what == "check" and rank == 2:
            return {"status": "wrong", "message": "wrong: relative errors"}
        if self.failing.get(column) == what:
            if column in self.fatal:
                raise RanksFailed(f"rank {rank} died")
            return {"status": "failed", "message": "cannot"}
        if what == "check":
            return {"status": "ok", "errors": {"out": 1e-3 * rank}, "sent_bytes": [10**6, 10**6]}
        if what == "time":
            ms = self.forward_ms[column] * (3.5 if request["of"] == "both" else 1)
            return {
                "status": "ok",
                "ms": ms - 0.5 * (self.num_ranks > 1 and rank != 1),
                "issue_ms": 0.1,
            }
        return {"status": "ok"}

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRanks]:
    monkeypatch.setattr(bench_node_attention, "Ranks", FakeRanks)
    times = {"alone/cudnn": 14.0, "te/p2p": 16.0, "balanced/nccl/cudnn": 15.5}
    times |= {"balanced/none/cudnn": 15.0, "balanced/nccl/none": 2.0}
    values = {"asked": [], "failing": {}, "fatal": set(), "forward_ms": times, "wrong": ""}
    for name, value in values.items():
        monkeypatch.setattr(FakeRanks, name, value)
    return FakeRanks


def run(path: Path, wanted: list[Column] = COLUMNS, budget_s: float = 1e9) -> dict[str, Any]:
    bench = AttentionBench(path, Node(1), budget_s)
    bench.run([CELL], [wanted], turns=3)
    return bench.results


def cases(results: dict[str, Any]) -> dict[str, Any]:
    (entry,) = results["cells"]
    return entry["columns"]


def test_names_are_read_back() -> None:
    for column in [
        c for group in columns(("ring",), ("copy",), ("cuda",), ("a2a",)) for c in group
    ]:
        assert Column.parse(column.name) == column
    for name in ("te/ring", "spiral/nccl/cudnn", "balanced/nccl", "alone"):
        with pytest.raises(ValueError, match="no column is called"):
            Column.parse(name)


def test_the_most_important_come_first() -> None:
    shapes = cells([4, 8], [8192, 4096], [(32, 8), (64, 8)])
    assert shapes[0] == CELL and len(shapes) == 8
    first, second = columns(("balanced", "ring"), ("nccl",), ("cuda",), ("p2p",))
    assert {STOCK, BOUND, Column("ours", "balanced", "nccl", "cuda")} <= set(first)
    assert {c.schedule for c in second} == {"ring"}


def test_columns_take_turns(fake: type[FakeRanks], tmp_path: Path) -> None:
    results = run(tmp_path / "r.json")
    timed = [column for _, what, column in fake.asked if what == "time"]
    per_turn = len(timed) // 4  # One turn warms up.
    assert timed[:per_turn] == timed[-per_turn:] and len(set(timed)) == len(COLUMNS)
    found = cases(results)[OURS.name]
    assert len(found["both_ms"]) == 3 and len(found["both_ms"][0]) == 4
    assert median_ms(found, "forward") == 15.5 and slowest_rank(found, "forward") == 1
    assert found["errors"] == {"out": 3e-3}
    assert json.loads((tmp_path / "r.json").read_text()) == results


def test_a_wrong_column_is_not_timed(fake: type[FakeRanks], tmp_path: Path) -> None:
    fake.failing[OURS.name] = "check"
    results = run(tmp_path / "r.json")
    assert cases(results)[OURS.name]["status"] == "failed"
    assert not [1 for _, what, c in fake.asked if what == "time" and c == OURS.name]
    assert median_ms(cases(results)[STOCK.name], "forward") == 16.0
    assert "balanced/nccl/cudnn (P = 4, 8k, 32/8): rank 0: cannot" in table(results)


@pytest.mark.parametrize(("wrong", "status"), [("", 0), (OURS.name, 1)])
def test_a_wrong_result_is_the_exit_status(
    fake: type[FakeRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, status: int
) -> None:
    fake.wrong = wrong
    fake.failing[STOCK.name] = "check"  # What cannot run here is no error.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--ranks", "4", "--tokens", "8192", "--heads", "32/8", "--turns", "1"]
    arguments += ["--columns", *(c.name for c in COLUMNS), "--json", str(tmp_path / "r.json")]
    assert bench_node.main(["attention", *arguments]) == status


def test_columns_that_there_was_no_time_for_are_named(
    fake: type[FakeRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    there_is_time = iter([False] * 3)  # For the cell and two of its columns.
    monkeypatch.setattr(AttentionBench, "_over", lambda self: next(there_is_time, True))
    found = cases(run(tmp_path / "r.json"))
    assert list(found) == [BOUND.name, STOCK.name]
    left = ", ".join(column.name for column in COLUMNS[2:])
    assert f"P = 4, 8k, 32/8: {left}: not run, the time is up" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["check", "time"])
def test_a_lost_group_is_replaced(fake: type[FakeRanks], tmp_path: Path, at: str) -> None:
    fake.failing[OURS.name] = at
    fake.fatal.add(OURS.name)
    found = cases(run(tmp_path / "r.json"))
    assert found[OURS.name]["message"] == "rank 0 died"
    assert all(median_ms(found[c.name], "both") > 0 for c in COLUMNS if c != OURS)
    opened = [1 for ranks, what, _ in fake.asked if what == "open" and ranks == 4]
    assert len(opened) == 2 * 4


def test_a_group_that_is_lost_in_a_trace_is_replaced(
    fake: type[FakeRanks], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fake.failing = {c.name: "trace" for c in COLUMNS}
    fake.fatal.add(OURS.name)
    cell = Cell(2, 8192, 32, 8)
    bench = AttentionBench(tmp_path / "r.json", Node(1), 1e9)
    bench.run([CELL, cell], [COLUMNS], turns=1, traces=tmp_path / "traces")
    for entry in bench.results["cells"]:
        assert all(median_ms(entry["columns"][c.name], "both") > 0 for c in COLUMNS)
    printed = capsys.readouterr().out
    assert "balanced/nccl/cudnn: no trace: rank 0 died" in printed
    assert "balanced/none/cudnn: no trace: rank 0: cannot" in printed


def test_only_what_is_missing_runs_again(fake: type[FakeRanks], tmp_path: Path) -> None:
    fake.failing[OURS.name] = "check"
    run(tmp_path / "r.json")
    fake.asked.clear()
    fake.failing.clear()
    results = run(tmp_path / "r.json")
    assert {c for _, what, c in fake.asked if what == "time"} == {OURS.name}
    assert len(results["runs"]) == 2 and cases(results)[OURS.name]["run"] == 1
    fake.asked.clear()
    run(tmp_path / "r.json")
    assert fake.asked == []


def test_nothing_starts_after_the_budget(fake: type[FakeRanks], tmp_path: Path) -> None:
    assert cases(run(tmp_path / "r.json", budget_s=-1.0)) == {}
    assert not fake.asked


def test_figures(fake: type[FakeRanks], tmp_path: Path) -> None:
    results = run(tmp_path / "r.json")
    one = Measured(results["cells"][0], num_gpus=1)
    assert one.percent(OURS, "forward") == pytest.approx(100 * 14.0 / 15.5)
    assert one.gain(OURS, "both") == pytest.approx(16.0 / 15.5)
    assert one.hidden_percent(OURS, "forward") == pytest.approx(75.0)
    flops = 4 * 128 * 32 * 32768**2 / 2 / 4
    assert one.tflops(STOCK, "forward") == pytest.approx(flops / 16e-3 / 1e12)
    assert one.tflops(STOCK, "both") == pytest.approx(one.tflops(STOCK, "forward"))
    assert one.sent_mb(OURS, "both") == pytest.approx(2.0)
    assert one.sent_mb(UNMOVED, "both") is None
    entry = results["cells"][0] | {"rank_multiprocessors": 32, "whole_multiprocessors": 132}
    share = Measured(entry, num_gpus=1).share_percent(OURS, "forward")
    assert share == pytest.approx(100 * 14.0 / 15.5 * 132 / 128)
    several = Measured(results["cells"][0], num_gpus=4)
    assert several.percent(OURS, "forward") == pytest.approx(100 * 14.0 / 4 / 15.5)


def test_table_and_plot(fake: type[FakeRanks], tmp_path: Path) -> None:
    results = run(tmp_path / "r.json")
    lines = table(results).splitlines()
    (ours,) = [line for line in lines if "| balanced/nccl/cudnn |" in line]
    assert "15.50 ± 0.00 | 142 | 90.3 | 1.032 | 75 |" in ours and ours.endswith("| 1 | 2 |")
    assert "num_gpus 1" in lines[0] and "torch 2" in lines[0]
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# ---- real ranks ---------------------------------------------------------------------------------


def on_cpu(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, bench_node.__file__, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


TINY = ("--ranks", "2", "--tokens", "64", "--heads", "4/2", "--head-dim", "16", "--turns", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on CPU ranks: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("bench-node")
    done = on_cpu(
        *("attention", *TINY, "--comms", "torch", "--kernels", "cpu", "--schedules", "balanced"),
        *("--stock", "p2p", "--json", str(folder / "r.json"), "--trace", str(folder)),
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_runs_on_cpu_ranks(tiny: tuple[Path, str]) -> None:
    folder, printed = tiny
    found = cases(json.loads((folder / "r.json").read_text()))
    usable = {"alone/cpu", "balanced/torch/cpu", "balanced/none/cpu", "balanced/torch/none"}
    assert {name for name, case in found.items() if case["status"] == "ok"} == usable
    assert all(median_ms(found[name], "both") > 0 for name in usable)
    assert max(found["balanced/torch/cpu"]["errors"].values()) < 1e-5
    assert "te/p2p (P = 2, 64, 4/2): rank 0: Transformer Engine's context parallelism" in printed


def test_bytes_are_the_plans(tiny: tuple[Path, str]) -> None:
    """P = 2: rank 0 sends half of KV, its partial of half of q with LSE; rank 1 half of q."""
    found = cases(json.loads((tiny[0] / "r.json").read_text()))
    rank0, rank1 = found["balanced/torch/cpu"]["sent_bytes"]
    row, f32 = 64 * 16, 4
    assert rank0[0] == (2 * row + 2 * row) * f32 + 64 * 2 * f32
    assert rank1[0] == 2 * row * f32


def test_a_wrong_result_is_found() -> None:
    import torch
    from bench_node_problem import TOLERANCES, Problem, torch_attention

    cell = Cell(1, 48, 4, 2, 16)
    problem = Problem(
        cell, 0, None, torch.device("cpu"), torch.float32, seed=random.randrange(1000)
    )
    q, k, v, dout = problem.inputs("contiguous")
    results = [torch_attention(q, k, v, None)]
    results += torch.autograd.grad(results[0], (q, k, v), dout)
    limit = TOLERANCES[torch.float32]
    assert max(problem.errors("contiguous", results).values()) < limit
    for idx, name in enumerate(("out", "dq", "dk", "dv")):
        wrong = [x.detach().clone() for x in results]
        wrong[idx][7, 0, 1] *= 1.01
        errors = problem.errors("contiguous", wrong)
        assert errors[name] > limit and sum(error > limit for error in errors.values()) == 1


def test_trace_shows_the_plan(tiny: tuple[Path, str], tmp_path: Path) -> None:
    (path,) = tiny[0].glob("*.balanced-torch-cpu.json")
    command = [sys.executable, "tools/plan.py", "--measured", str(path)]
    picture = tmp_path / "measured.png"
    done = subprocess.run(
        [*command, "--png", str(picture)],
        cwd=Path(bench_node.__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("balanced/torch/cpu: 64 tokens per rank, 4/2 heads\n")
    assert "balanced forward: " in done.stdout and "balanced backward: " in done.stdout
    assert picture.stat().st_size > 10_000


def test_a_plan_without_communication_is_traced_too(tiny: tuple[Path, str]) -> None:
    (path,) = tiny[0].glob("*.balanced-none-cpu.json")
    _, (forward, backward) = read_trace(path)
    assert forward.planned_ms > 0 and backward.length_ms > 0
    assert not any(timeline.transfers for timeline in forward.ranks)


def test_all_keeps_to_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: dict[str, float] = {}

    def part(name: str, went: str) -> Callable[..., str]:
        def run_part(node: Node, out: Path, part_s: float) -> str:
            limits[name] = part_s
            return went

        return run_part

    wents = {"build": "done", "check": "failed", "attention": "cut off", "overlap": "done"}
    parts = {name: part(name, went) for name, went in (wents | {"train": "done"}).items()}
    monkeypatch.setattr(bench_node_all, "_PARTS", parts)
    outcomes = bench_node_all.run(Node(1), tmp_path, 600.0)
    assert [o.part for o in outcomes if o.is_bad] == ["check", "attention"]
    assert limits["build"] == pytest.approx(90.0, abs=1)
    assert limits["train"] == pytest.approx(600.0, abs=1)  # Nobody before took any time.
    on_cpu = bench_node_all.run(Node(0), tmp_path, 600.0)
    assert [o.went for o in on_cpu] == ["done", "left out", "cut off", "left out", "done"]


def test_scripts_on_ranks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; rank = os.environ['RANK']; print('I am', rank); exit(rank == '1')"
    )
    assert bench_node_all._scripts(Node(0), 3, [str(script)], 30.0) == "failed"
    assert capsys.readouterr().out == "rank 0:\nI am 0\nrank 1:\nI am 1\n"
    script.write_text("import time; time.sleep(60)")
    assert bench_node_all._scripts(Node(0), 2, [str(script)], 0.5) == "cut off"


PART = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True, file=open("pid", "w"))
try:
    time.sleep(60)
finally:
    open("tidied", "w").close()
"""


def test_a_part_that_is_cut_off_ends_with_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_node_all, "ROOT", tmp_path)
    assert (
        bench_node_all._command([sys.executable, "-c", PART], 6.0) == "cut off"
    )  # it has to start by then
    assert (tmp_path / "tidied").exists()
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5.0
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """A process whose end nobody has asked for yet has ended too."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
