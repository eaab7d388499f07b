"""What a plan did, read from a Chrome trace of its ranks (``tools/bench_node.py --trace``).

The executor names what it does after the plan: ``distflash step 2 q0:64/k64:128/h0:8`` computes
that task, or several in one launch, with blanks between. Times are those of the GPU where the trace
has them, and of the host's calls on CPU ranks.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_node_trace import METADATA, rank_of

from megatron_distflash.plan import Plan
from megatron_distflash.plan.cost import step_work, task_work
from megatron_distflash.plan.plan import Task

_LABEL = re.compile(r"distflash step (\d+) (q\S+/k\S+/h\S+(?: q\S+/k\S+/h\S+)*)$")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_GLOO = ("gloo:send", "gloo:recv")


@dataclass(frozen=True, slots=True)
class Spell:
    """Something that took time, in ms since the first rank began."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """What one rank did in one direction.

    Attributes:
        tasks: (step, task, when), in the order of time.
        others: merges, sums and copies, on the stream that computes.
        transfers: on other streams; on the host, while a send or receive was open.
    """

    tasks: tuple[tuple[int, Task, Spell], ...]
    others: tuple[Spell, ...]
    transfers: tuple[Spell, ...]


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One direction: the plan and what each rank did of it."""

    plan: Plan
    ranks: tuple[RankTimeline, ...]

    @property
    def length_ms(self) -> float:
        """Until the last rank was done."""
        spells = [spell for rank in self.ranks for spell in _all(rank)]
        return max(spell.end for spell in spells)

    @property
    def block_ms(self) -> float:
        """What one block of n × n took on average, of a rank's time."""
        took = sum(spell.length for rank in self.ranks for _, _, spell in rank.tasks)
        work = sum(task_work(self.plan, task) for rank in self.ranks for _, task, _ in rank.tasks)
        return took / float(work)

    @property
    def planned_ms(self) -> float:
        """The plan's own length if every block took so long and nothing else took time."""
        plan = self.plan
        slowest = [
            max(step_work(plan, rank, idx) for rank in range(plan.num_ranks))
            for idx in range(plan.num_steps)
        ]
        return float(sum(slowest)) * self.block_ms

    def computing_ms(self, rank: int) -> float:
        return sum(spell.length for _, _, spell in self.ranks[rank].tasks)

    def others_ms(self, rank: int) -> float:
        return sum(spell.length for spell in self.ranks[rank].others)


def read_trace(path: Path) -> tuple[str, list[MeasuredPlan]]:
    """(what was traced, forward and backward).

    Raises:
        ValueError: the file holds no such trace, or the trace does not show its plan's tasks.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        try:
            trace = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is no trace: {error}") from error
    about = trace.get(METADATA, {}) if isinstance(trace, dict) else {}
    noted = about.get("ranks") or [{}]
    if not noted[0].get("plans"):
        raise ValueError(
            f"{path} has no plan in it: give a trace of one of our columns, written by "
            "tools/bench_node.py attention --trace"
        )
    plans = [Plan.from_json(json.dumps(plan)) for plan in noted[0]["plans"]]
    cell, column = about["cell"], about["column"]
    title = f"{column}: {cell['tokens']} tokens per rank, {cell['heads']}/{cell['kv_heads']} heads"
    return title, _measured(plans, trace["traceEvents"], path)


def _measured(plans: list[Plan], events: list[dict[str, Any]], path: Path) -> list[MeasuredPlan]:
    by_rank: list[list[dict[str, Any]]] = [[] for _ in range(plans[0].num_ranks)]
    for event in events:
        if event.get("ph") == "X" and (rank := rank_of(event)) is not None:
            by_rank[rank].append(event)
    walks = [
        list(_walks(plans, rank, sorted(own, key=lambda e: e["ts"]), path))
        for rank, own in enumerate(by_rank)
    ]
    return [
        _on_one_axis(plan, [walk[idx] for walk in walks], path) for idx, plan in enumerate(plans)
    ]


@dataclass(frozen=True, slots=True)
class _Walk:
    """A rank's events of one direction, with labels parsed: (step, task names, event)."""

    tasks: list[tuple[int, list[str], dict[str, Any]]]
    others: list[dict[str, Any]]
    transfers: list[dict[str, Any]]


def _walks(
    plans: list[Plan], rank: int, events: list[dict[str, Any]], path: Path
) -> Iterator[_Walk]:
    """One rank's events, cut where all tasks of one direction are done."""
    on_gpu = any(e.get("cat") == "gpu_user_annotation" and _LABEL.match(e["name"]) for e in events)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    labelled = [
        (int(match[1]), match[2].split(" "), event)
        for event in events
        if event.get("cat") == kind and (match := _LABEL.match(event["name"]))
    ]
    ends = _ends([len(names) for _, names, _ in labelled], plans, rank, path)
    streams = {event["tid"] for _, _, event in labelled}
    for start, stop in zip([0, *ends], ends, strict=False):
        tasks = labelled[start:stop]
        since = tasks[0][2]["ts"] if start else -float("inf")
        until = labelled[stop][2]["ts"] if stop < len(labelled) else float("inf")
        meanwhile = [e for e in events if since <= e["ts"] < until]
        if on_gpu:
            moved = [e for e in meanwhile if e.get("cat") in _ON_GPU and e["tid"] not in streams]
            others = [e for e in meanwhile if e.get("cat") in _ON_GPU and e["tid"] in streams]
            others = [e for e in others if not any(_inside(e, t) for _, _, t in tasks)]
        else:
            moved, others = [e for e in meanwhile if e["name"] in _GLOO], []
        yield _Walk(tasks, others, moved)


def _ends(launched: list[int], plans: list[Plan], rank: int, path: Path) -> list[int]:
    """Behind which launch each plan ends; ``launched``: the tasks of each launch."""
    seen = [0, *itertools.accumulate(launched)]
    sizes = [sum(len(step.tasks) for step in plan.steps[rank]) for plan in plans]
    counts = list(itertools.accumulate(sizes))
    if seen[-1] != counts[-1] or not set(counts) <= set(seen):
        raise ValueError(f"{path} shows {seen[-1]} tasks of rank {rank}, not {counts[-1]}")
    return [seen.index(count) for count in counts]


def _inside(event: dict[str, Any], other: dict[str, Any]) -> bool:
    return other["ts"] <= event["ts"] < other["ts"] + other["dur"]


def _on_one_axis(plan: Plan, walks: list[_Walk], path: Path) -> MeasuredPlan:
    zero = min(walk.tasks[0][2]["ts"] for walk in walks)

    def spell(event: dict[str, Any]) -> Spell:
        return Spell((event["ts"] - zero) / 1e3, (event["ts"] + event["dur"] - zero) / 1e3)

    ranks = []
    for rank, walk in enumerate(walks):
        tasks = [
            (step_idx, task, part)
            for step_idx, names, event in walk.tasks
            for task, part in _parts(plan, _tasks(plan, rank, step_idx, names, path), spell(event))
        ]
        others, moved = map(spell, walk.others), map(spell, walk.transfers)
        ranks.append(RankTimeline(tuple(tasks), tuple(others), tuple(moved)))
    return MeasuredPlan(plan, tuple(ranks))


def _tasks(plan: Plan, rank: int, step_idx: int, names: Iterable[str], path: Path) -> list[Task]:
    known = {
        f"q{task.queries}/k{task.keys}/h{task.heads}": task
        for task in plan.steps[rank][step_idx].tasks
    }
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"{path}: rank {rank} has no task {missing[0]} in step {step_idx}")
    return [known[name] for name in names]


def _parts(plan: Plan, tasks: list[Task], spell: Spell) -> Iterator[tuple[Task, Spell]]:
    """The tasks of one launch, each with its share of the time by its work."""
    works = [float(task_work(plan, task)) for task in tasks]
    now = spell.start
    for task, work in zip(tasks, works, strict=True):
        end = now + spell.length * work / sum(works)
        yield task, Spell(now, end)
        now = end


def _all(rank: RankTimeline) -> Iterator[Spell]:
    yield from (spell for _, _, spell in rank.tasks)
    yield from rank.others


def as_text(title: str, measured: list[MeasuredPlan]) -> str:
    """Where each rank's time went."""
    lines = [title]
    for one in measured:
        total = one.length_ms
        lines += [
            "",
            f"{one.plan.schedule} {one.plan.direction}: {total:.2f} ms; "
            f"{one.planned_ms:.2f} ms if nothing but blocks took time ({one.block_ms:.2f} ms each)",
            "rank   blocks   merges, copies   idle, ms",
        ]
        for rank in range(one.plan.num_ranks):
            computing, others = one.computing_ms(rank), one.others_ms(rank)
            idle = max(0.0, total - computing - others)
            lines.append(f"{rank:4} {computing:8.2f} {others:16.2f} {idle:10.2f}")
    return "\n".join(lines)
