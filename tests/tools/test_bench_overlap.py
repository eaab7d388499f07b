"""What the overlap benchmark checks before it times."""

import argparse
import random

import bench_overlap
import pytest
import torch
from bench_overlap import NAMES, Bench, Clock
from torch import Tensor

from megatron_distflash.runtime import reference


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Of one rank, which moves nothing."""
    monkeypatch.setattr(bench_overlap.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench_overlap.dist, "get_world_size", lambda: 1)
    args = argparse.Namespace(
        heads=4, kv_heads=2, head_dim=16, schedule="balanced", prefetch=2, no_cut=False,
        kernel="cpu", backward=True, seed=random.randrange(2**31),
    )  # fmt: skip
    return Bench(args, 64, torch.device("cpu"))


def test_right_results_pass(bench: Bench) -> None:
    bench.check([reference.NoTransport()] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_result_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = bench.call

    def wrong(transports: list) -> list[Tensor]:
        return [x * 1.05 if n == name else x for n, x in zip(NAMES, right(transports), strict=True)]

    monkeypatch.setattr(bench, "call", wrong)
    with pytest.raises(AssertionError, match=f"rank 0: {name} is off by"):
        bench.check([reference.NoTransport()] * 2)


# ---- the table: rows that take a second each, on a clock that only they move --------------------


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """table(budget_s) gives (rows measured, rows printed, rows missing) of a run with one file."""
    clock, measured = FakeTime(), []

    def measure(args, device, cell, executor, clock_of_run) -> dict:
        executor  # noqa: B018
        measured.append((cell["comm"], cell["ctas"], cell["tokens"]))
        clock.now_s += 1.0
        return {
            "compute_ms": 1.0, "transfers_ms": 2.0, "both_ms": 3.0, "spread_ms": 0.0,
            "hidden": 0.5, "slowdown": 0.01, "exposed": 0.1, "post_us": 4.0, "repeats": 7,
        }  # fmt: skip

    monkeypatch.setattr(bench_overlap, "time", clock)
    monkeypatch.setattr(bench_overlap, "measure", measure)
    monkeypatch.setattr(bench_overlap, "NativeExecutor", lambda *_, **__: FakeExecutor())
    monkeypatch.setattr(bench_overlap.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench_overlap.dist, "broadcast_object_list", lambda objects: None)
    args = argparse.Namespace(
        comm=["nccl", "copy"], ctas=[1, 2], order=[None], tokens=[4096, 8192],
        in_progress=False, json=tmp_path / "out" / "rows.json",
    )  # fmt: skip

    def run(budget_s: float | None, **settings):
        measured.clear()
        missing = bench_overlap.measure_all(
            args, torch.device("cpu"), {"ranks": 4, **settings}, Clock(budget_s)
        )
        return list(measured), missing

    return run


class FakeExecutor:
    def close(self) -> None:
        pass


def test_a_table_stops_in_time_and_goes_on(table, capsys) -> None:
    first, missing = table(2.5)
    assert first == [("nccl", 1, 4096), ("nccl", 1, 8192), ("nccl", 2, 4096)]
    assert missing == ["nccl 2 8192", "copy 4096", "copy 8192"]
    assert len(capsys.readouterr().out.splitlines()) == 3
    second, missing = table(None)
    assert second == [("nccl", 2, 8192), ("copy", 0, 4096), ("copy", 0, 8192)]
    assert missing == [] and len(capsys.readouterr().out.splitlines()) == 6
    assert table(None)[0] == []
    assert len(table(None, ranks=8)[0]) == 6  # another table


def test_rows_are_cut_short_where_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()

    def once(call, calls, each=None) -> tuple[float, float]:
        clock.now_s += 1.0
        return 1.0, 1.0

    monkeypatch.setattr(bench_overlap, "time", clock)
    monkeypatch.setattr(bench_overlap, "once", once)
    monkeypatch.setattr(bench_overlap, "post_us", lambda *_: 1.0)
    monkeypatch.setattr(bench_overlap.dist, "broadcast_object_list", lambda objects: None)
    bench = argparse.Namespace(
        plans=lambda: ["a plan"], k=None, check=lambda _: None, num_ranks=2, tokens=8,
        transfers=lambda _: None, transports=lambda _: [reference.NoTransport()],
    )  # fmt: skip
    executor = argparse.Namespace()
    for budget_s, repeats in ((None, 7), (100, 7), (20, 4), (16, 3), (13, None)):
        found = bench_overlap.row(bench, executor, 7, 1, Clock(budget_s))
        assert found.get("repeats") == repeats, budget_s
        clock.now_s = 0.0
