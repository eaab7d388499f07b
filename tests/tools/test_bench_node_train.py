"""Training rows on several ranks: how their answers become one case; one tiny real run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_node
import bench_node_train
import bench_train
import pytest
from bench_ranks import Node, RanksFailed


def answer(rank: int, **other: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "loss": 9.0,
        "grad_norm": 1.5,
        "iteration_s": [0.2 + 0.01 * rank, 0.3 - 0.01 * rank],
        "static_bytes": 1e9,
        "peak_bytes": 1e10 + rank * 1e9,
        "peak_reserved_bytes": 2e10,
        "usable_bytes": 1e11 - rank * 1e9,
    } | other


class FakeRanks:
    """Ranks that answer what ``answers`` makes of a row."""

    answers: dict[str, Any] = {}
    made: list[tuple[list[str], list[dict[str, str]]]] = []

    def __init__(self, command: list[str], environments: list[Any], timeout_s: float) -> None:
        self._row, self._num_ranks = command[1], len(environments)
        self.made.append((command, environments))

    def wait_ready(self) -> None:
        if self._row == "ours-offload":
            raise RanksFailed("rank 3 died")

    def ask(self, request: dict[str, int]) -> list[dict[str, Any]]:
        made = self.answers.get(self._row, answer)
        if isinstance(made, Exception):
            raise made
        return [made(rank) for rank in range(self._num_ranks)]

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRanks]:
    monkeypatch.setattr(bench_train, "Ranks", FakeRanks)
    monkeypatch.setattr(FakeRanks, "answers", {})
    monkeypatch.setattr(FakeRanks, "made", [])
    return FakeRanks


def run(path: Path, rows: list[str], ranks: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return bench_node_train.run(
        path, Node(1), rows, ranks, [32768],
        shape="tiny", options={"comm": "nccl"}, budget_s=1e9, timeout_s=1.0,
    )  # fmt: skip


def test_the_slowest_rank_counts(fake: type[FakeRanks], tmp_path: Path) -> None:
    (case,) = run(tmp_path / "r.json", ["stock-full"])["cases"]
    assert case["iteration_s"] == pytest.approx([0.23, 0.3])
    assert (case["peak_bytes"], case["usable_bytes"]) == (1.3e10, 9.7e10)
    command, environments = fake.made[0]
    assert json.loads(command[-1]) == {"comm": "nccl"} and len(environments) == 4


def test_numbers_of_ranks_are_kept_apart(fake: type[FakeRanks], tmp_path: Path) -> None:
    fake.answers["ours-remat"] = lambda rank: answer(rank, iteration_s=[0.15])
    rows = ["stock-full", "ours-remat"]
    results = run(tmp_path / "r.json", rows, (4, 2))
    assert len(results["cases"]) == 4
    made = len(fake.made)
    assert run(tmp_path / "r.json", rows, (4, 2)) == results and len(fake.made) == made
    lines = bench_node_train.table(results).splitlines()
    (ours,) = [line for line in lines if line.startswith("| P = 4 | ours-remat")]
    assert "(1.77×), 13.0 GB | 9.0000 |" in ours
    assert "num_gpus 1" in lines[0] and "longest" not in "".join(lines)
    bench_node_train.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_one_rank_out_of_memory(fake: type[FakeRanks], tmp_path: Path) -> None:
    """The others wait for it in vain."""
    full = {"status": "out of memory", "message": "CUDA out of memory."}
    fake.answers["stock-none"] = RanksFailed("rank 0 gave no answer in 1 s", [full])
    fake.answers["ours-none"] = RanksFailed("rank 0 died")
    cases = run(tmp_path / "r.json", ["stock-none", "ours-none", "ours-offload"])["cases"]
    assert [case["status"] for case in cases] == ["out of memory", "failed", "failed"]
    assert cases[-1]["message"] == "rank 3 died"


@pytest.mark.parametrize(("row", "status"), [("stock-tp-full", "ok"), ("ours-remat", "wrong")])
def test_other_weights_may_differ_more(
    fake: type[FakeRanks], tmp_path: Path, row: str, status: str
) -> None:
    fake.answers[row] = lambda rank: answer(rank, loss=9.03)
    cases = run(tmp_path / "r.json", ["stock-full", row])["cases"]
    assert [case["status"] for case in cases] == ["ok", status]


def test_ranks_train(tmp_path: Path) -> None:
    """On CPU ranks, where stock has no context parallelism; there, TP draws the same weights."""
    path = tmp_path / "r.json"
    command = ["train", "--shape", "tiny", "--ranks", "2", "--tokens", "64"]
    command += ["--rows", "stock-tp-full", "ours-remat"]
    done = subprocess.run(
        [sys.executable, bench_node.__file__, *command, "--json", str(path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    stock, ours = json.loads(path.read_text())["cases"]
    assert (stock["status"], ours["status"], ours["ranks"]) == ("ok", "ok", 2)
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-4)


def test_longest_sequence_on_gpus_of_their_own() -> None:
    cases = [
        answer(0, row="ours-remat", ranks=8, tokens=n, peak_bytes=1e10 + n * 1e5)
        for n in (65536, 262144)
    ]
    runs = [{"device": "a GPU", "num_gpus": 8}]
    longest = (1e11 - 1e10) / 1e5 // 1024
    lines = bench_node_train.table({"runs": runs, "cases": cases}).splitlines()
    assert lines[-1].endswith(f"| ≈ {longest:.0f}k |")
