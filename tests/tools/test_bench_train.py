"""The training benchmark: what it runs, checks, keeps and reports; and one tiny real run."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_train
import pytest

STATIC_BYTES = 2e10
USABLE_BYTES = 1.4e11


class FakeWorker:
    """A row whose iterations take time and memory by a formula; counts what it is asked."""

    asked: list[tuple[str, int, int]] = []
    importing: set[str] = set()
    loss_of: dict[str, float] = {}

    def __init__(self, row: str, shape: str, timeout_s: float) -> None:
        self.row = row
        self.importing.add(row)

    def wait_ready(self) -> None:
        self.importing.remove(self.row)

    def ask(self, num_tokens: int, num_iterations: int) -> dict[str, Any]:
        assert not self.importing, "other rows' imports take time from this one"
        self.asked.append((self.row, num_tokens, num_iterations))
        peak_bytes = STATIC_BYTES + num_tokens * (8e5 if self.row == "stock-none" else 2e5)
        if peak_bytes > USABLE_BYTES:
            return {"status": "out of memory", "message": "CUDA out of memory."}
        slow = 1.2 if self.row == "stock-full" else 1.0
        return {
            "status": "ok",
            "loss": self.loss_of.get(self.row, 9.0),
            "grad_norm": 1.5,
            "iteration_s": [slow * (num_tokens / 1e5) ** 2] * num_iterations,
            "peak_bytes": peak_bytes,
            "usable_bytes": USABLE_BYTES,
        }

    def close(self) -> None:
        pass


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(bench_train, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "asked", [])
    monkeypatch.setattr(FakeWorker, "importing", set())
    monkeypatch.setattr(FakeWorker, "loss_of", {})
    return FakeWorker


def run(path: Path, rows: list[str], lengths: list[int], budget_s: float = 1e9) -> dict[str, Any]:
    bench = bench_train.Bench(path, "tiny", budget_s)
    bench.run(rows, lengths, timeout_s=1.0)
    return bench.results


def statuses(results: dict[str, Any]) -> dict[tuple[str, int], str]:
    return {(case["row"], case["tokens"]): case["status"] for case in results["cases"]}


def test_out_of_memory_ends_a_row_only(worker: Any, tmp_path: Path) -> None:
    lengths = [400_000, 200_000, 100_000]
    results = run(tmp_path / "r.json", ["stock-none", "stock-full"], lengths)
    assert statuses(results) == {
        ("stock-none", 100_000): "ok",
        ("stock-none", 200_000): "out of memory",
        ("stock-full", 100_000): "ok",
        ("stock-full", 200_000): "ok",
        ("stock-full", 400_000): "ok",
    }


def test_long_iterations_run_once(worker: Any, tmp_path: Path) -> None:
    run(tmp_path / "r.json", ["stock-full"], [10_000, 100_000, 400_000])
    assert worker.asked == [
        ("stock-full", 10_000, 1),
        ("stock-full", 10_000, 1),  # Nothing told yet how long it takes.
        ("stock-full", 10_000, bench_train.MAX_ITERATIONS),
        ("stock-full", 100_000, 1),  # Checked and warmed up,
        ("stock-full", 100_000, 2),  # then timed for some 3 s.
        ("stock-full", 400_000, 1),
    ]


def test_only_what_is_missing_runs_again(worker: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    worker.loss_of["ours-remat"] = 9.5
    first = run(path, ["stock-none", "stock-full", "ours-remat"], [100_000, 200_000])
    assert statuses(first)["ours-remat", 100_000] == "wrong"
    worker.asked.clear()
    worker.loss_of.clear()
    again = run(path, ["stock-none", "stock-full", "ours-remat"], [100_000, 200_000, 400_000])
    assert {(row, n) for row, n, _ in worker.asked} == {
        ("stock-full", 400_000),
        ("ours-remat", 100_000),
        ("ours-remat", 200_000),
        ("ours-remat", 400_000),
    }
    assert list(statuses(again).values()).count("ok") == 7
    assert json.loads(path.read_text()) == again


@pytest.mark.parametrize("loss", [9.02, 8.98, float("nan")])
def test_a_different_loss_is_not_timed(worker: Any, tmp_path: Path, loss: float) -> None:
    worker.loss_of["ours-remat"] = loss
    results = run(tmp_path / "r.json", ["stock-full", "ours-remat"], [100_000])
    assert statuses(results)["ours-remat", 100_000] == "wrong"
    assert [n for row, _, n in worker.asked if row == "ours-remat"] == [1]


def test_nothing_starts_after_the_budget(worker: Any, tmp_path: Path) -> None:
    results = run(tmp_path / "r.json", ["stock-full"], [100_000, 400_000], budget_s=10.0)
    assert statuses(results) == {("stock-full", 100_000): "ok"}


def test_another_shape_needs_another_file(worker: Any, tmp_path: Path) -> None:
    run(tmp_path / "r.json", ["stock-full"], [100_000])
    with pytest.raises(ValueError, match="choose another --json"):
        bench_train.Bench(tmp_path / "r.json", "llama-8b-layers", 1.0)


def test_longest_sequence() -> None:
    slope = random.uniform(1e5, 4e5)
    cases = [
        {
            "status": "ok",
            "tokens": n,
            "peak_bytes": STATIC_BYTES + slope * n,
            "usable_bytes": USABLE_BYTES,
        }
        for n in (32_768, 65_536, 131_072)
    ]
    expected = (USABLE_BYTES - STATIC_BYTES) / slope
    assert bench_train.longest_tokens(cases[:1]) is None
    assert expected - 1024 <= bench_train.longest_tokens(cases) <= expected
    cases.append({"status": "out of memory", "tokens": 140_000})
    assert bench_train.longest_tokens(cases) <= 140_000


def test_table_and_plot(worker: Any, tmp_path: Path) -> None:
    rows = ["stock-none", "stock-full", "ours-remat"]
    results = run(tmp_path / "r.json", rows, [102_400, 204_800])
    none, full, ours = bench_train.table(results).splitlines()[2:]
    assert "out of memory" in none
    assert "1258 ± 0 ms (1.00×), 40.5 GB" in full
    assert "1049 ± 0 ms (1.20×), 40.5 GB" in ours
    assert ours.endswith("| ≈ 585k |")
    bench_train.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_rows_train(tmp_path: Path) -> None:
    """Real workers, on CPU ranks also where there is a GPU."""
    path = tmp_path / "r.json"
    command = f"--shape tiny --rows stock-full ours-remat --tokens 64 --json {path}".split()
    subprocess.run(
        [sys.executable, bench_train.__file__, *command],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    stock, ours = json.loads(path.read_text())["cases"]
    assert (stock["status"], ours["status"]) == ("ok", "ok")
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-6)
    assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-5)
    assert 1 <= len(ours["iteration_s"]) <= bench_train.MAX_ITERATIONS
