"""Reading what a plan did from a trace: synthetic traces with known times."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from bench_node_trace import merge_traces
from plan_trace import MeasuredPlan, as_text, read_trace

from megatron_distflash.plan import Mask, Plan, build, build_backward
from megatron_distflash.plan.cost import task_work

LENGTHS = (256, 256, 256, 256)
OPTIONS = {"num_heads": 8, "num_kv_heads": 4, "mask": Mask.causal()}


def plans_of(schedule: str) -> list[Plan]:
    return [make(schedule, LENGTHS, **OPTIONS) for make in (build, build_backward)]


PLANS = plans_of("balanced")
BLOCK_US, MERGE_US, GAP_US = 1000.0, 70.0, 30.0
COMPUTES, MOVES = 7, 20  # Streams.


def event(cat: str, name: str, ts: float, dur: float, tid: int) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur}


def rank_trace(plans: list[Plan], rank: int, start_us: float, base_ns: int) -> dict[str, Any]:
    """Every step in one launch: an annotation with its kernels, a merge after it, a transfer."""
    events: list[dict[str, Any]] = []
    now = start_us
    for plan in plans:
        for step_idx, step in enumerate(plan.steps[rank]):
            if not step.tasks:
                continue
            names = " ".join(f"q{t.queries}/k{t.keys}/h{t.heads}" for t in step.tasks)
            took = BLOCK_US * float(sum(task_work(plan, task) for task in step.tasks))
            label = f"distflash step {step_idx} {names}"
            events += [
                event("user_annotation", label, now - 500, 10, 1),
                event("gpu_user_annotation", label, now, took, COMPUTES),
                event("kernel", "attention", now, took, COMPUTES),
                event("kernel", "merge", now + took, MERGE_US, COMPUTES),
                event("kernel", "nccl", now + 1, took / 2, MOVES),
                event("gpu_user_annotation", f"distflash step {step_idx} post", now, 9, MOVES),
            ]
            now += took + MERGE_US + GAP_US
    random.shuffle(events)
    noted = [json.loads(plan.to_json()) for plan in plans]
    return {
        "baseTimeNanoseconds": base_ns,
        "distflash": {"rank": rank, "plans": noted},
        "traceEvents": [*events, {"ph": "M", "name": "process_name", "args": {"name": "python"}}],
    }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(PLANS, tmp_path)


def write_trace(plans: list[Plan], folder: Path) -> Path:
    """Of four ranks whose clocks count from other zeros; rank r begins 10·r µs later."""
    paths = []
    for rank in range(4):
        paths.append(folder / f"rank{rank}.json")
        base_ns = 10**18 + rank * 10**6
        begins_us = 5000.0 + 10 * rank - rank * 10**3
        paths[-1].write_text(json.dumps(rank_trace(plans, rank, begins_us, base_ns)))
    cell = {"num_ranks": 4, "tokens": 256, "heads": 8, "kv_heads": 4, "head_dim": 64}
    merge_traces(paths, folder / "trace.json", {"cell": cell, "column": "balanced/nccl/cuda"})
    assert not any(path.exists() for path in paths)
    return folder / "trace.json"


def num_launches(plan: Plan, rank: int) -> int:
    return sum(bool(step.tasks) for step in plan.steps[rank])


def check_rank(one: MeasuredPlan, rank: int) -> None:
    planned = [(i, t) for i, step in enumerate(one.plan.steps[rank]) for t in step.tasks]
    timeline = one.ranks[rank]
    assert [(i, task) for i, task, _ in timeline.tasks] == planned
    for _, task, spell in timeline.tasks:
        assert spell.length == pytest.approx(float(task_work(one.plan, task)) * BLOCK_US / 1e3)
    launches = num_launches(one.plan, rank)
    assert one.others_ms(rank) == pytest.approx(launches * MERGE_US / 1e3)
    assert len(timeline.transfers) == launches


def test_times_are_found(trace: Path) -> None:
    title, measured = read_trace(trace)
    assert title == "balanced/nccl/cuda: 256 tokens per rank, 8/4 heads"
    assert [one.plan for one in measured] == PLANS
    for one in measured:
        for rank in range(4):
            check_rank(one, rank)
        assert one.block_ms == pytest.approx(BLOCK_US / 1e3)
        assert one.planned_ms == pytest.approx(2 * BLOCK_US / 1e3)
        starts = [timeline.tasks[0][2].start for timeline in one.ranks]
        assert starts == pytest.approx([0.0, 0.01, 0.02, 0.03])
    text = as_text(title, measured)
    assert "balanced forward: " in text and "2.00 ms if nothing but blocks took time" in text


@pytest.mark.parametrize("schedule", ["paper", "ring", "zigzag"])
def test_ranks_whose_directions_meet_in_one_step(tmp_path: Path, schedule: str) -> None:
    """The ring's rank 0 has one task, in the first step of either direction."""
    plans = plans_of(schedule)
    _, measured = read_trace(write_trace(plans, tmp_path))
    assert [one.plan for one in measured] == plans
    for one in measured:
        for rank in range(4):
            check_rank(one, rank)


def test_compressed_traces(trace: Path) -> None:
    packed = trace.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert read_trace(packed) == read_trace(trace)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"distflash": {"ranks": [{"plans": []}]}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no trace|has no plan in it"):
        read_trace(path)


def test_a_trace_of_another_plan_is_refused(trace: Path) -> None:
    text = trace.read_text()
    assert "step 0 q0:" in text
    trace.write_text(text.replace("step 0 q0:", "step 0 q8:"))
    with pytest.raises(ValueError, match="has no task q8:"):
        read_trace(trace)


def test_a_rank_that_shows_nothing_is_named(trace: Path) -> None:
    data = json.loads(trace.read_text())
    data["traceEvents"] = [e for e in data["traceEvents"] if e.get("pid", 0) != 2 * 100_000_000]
    trace.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"shows 0 tasks of rank 2, not \d+"):
        read_trace(trace)
