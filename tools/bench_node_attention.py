"""The launcher's side of tools/bench_node.py attention: what is asked of the ranks, and kept."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_node_cells import PASSES, WRONG, Cell, Column
from bench_node_trace import merge_traces
from bench_ranks import Node, Ranks, RanksFailed, environment

WORKER = Path(__file__).with_name("bench_node_worker.py")
TURNS = 5
PATIENCE_S = 15.0  # An answer may take that long although the time is up.
# A turn of a column lasts about so long, calls back to back: as in training, the host runs ahead.
CALLS_S, MAX_CALLS = 0.25, 8
SLOW_S, SLOW_TURNS = 0.4, 3  # Calls longer than that take fewer turns.


class AttentionBench:
    """Measures cells and keeps the results in a file, which also says what is done already.

    Columns of a group take turns, so that a clock that drifts is the same for all.
    """

    def __init__(
        self, path: Path, node: Node, budget_s: float, timeout_s: float = 60.0, seed: int = 1
    ) -> None:
        self._path, self._node, self._seed = path, node, seed
        self._end, self._timeout_s = time.monotonic() + budget_s, timeout_s
        self._groups: dict[int, Ranks] = {}
        self.results: dict[str, Any] = {"runs": [], "cells": []}
        if path.exists():
            self.results = json.loads(path.read_text())

    def run(
        self,
        cells: Sequence[Cell],
        groups: Sequence[Sequence[Column]],
        turns: int = TURNS,
        traces: Path | None = None,
        traced: Sequence[str] | None = None,
    ) -> None:
        """Measure what is missing: every cell's first group of columns, then the second ones.

        Args:
            traces: a folder for traces, of the columns that ``traced`` names; None: of all.
        """
        todo = [(cell, self._missing(cell, group)) for group in groups for cell in cells]
        todo = [(cell, columns) for cell, columns in todo if columns]
        if not todo:
            return
        self.results["runs"].append(environment() | self._node.about())
        try:
            for num_ranks in {1, *(cell.num_ranks for cell, _ in todo)}:
                self._start(num_ranks)
            for ranks in self._groups.values():
                ranks.wait_ready()
            for cell, columns in todo:
                if self._over():
                    print(f"{cell.name}: not run, the time is up", flush=True)
                    continue
                usable = self._measure(cell, columns, turns)
                for column in usable if traces is not None else ():
                    if self._over():
                        break
                    if column.family != "alone" and column.name in (traced or [column.name]):
                        self._trace(cell, column, traces, usable)
                self._ask_all(cell, {"do": "close"})
        except RanksFailed as error:
            if not self._over():
                raise
            print(f"the time is up: {error}", flush=True)
        finally:
            for ranks in self._groups.values():
                ranks.close()
            self._groups.clear()

    # -- one cell -------------------------------------------------------------------------------

    def _measure(self, cell: Cell, columns: Sequence[Column], turns: int) -> list[Column]:
        """Returns the columns that could be measured; they are still open."""
        self._open(cell)
        left, usable = list(columns), []
        while left and not self._over():
            column = left.pop(0)
            case = self._guarded(cell, column, {"do": "check"}, reopen=usable)
            if case is None:
                continue
            self._keep(cell, column, case)
            usable += [column] if case["status"] == "ok" else []
        if left:
            names = ", ".join(column.name for column in left)
            print(f"{cell.name}: {names}: not run, the time is up", flush=True)
        self._ask_all(cell, {"do": "drop_wanted"})
        self._take_turns(cell, usable, turns)
        for column in usable:
            print(f"{cell.name}: {column.name}: {self._line(cell, column)}", flush=True)
        return usable

    def _open(self, cell: Cell) -> None:
        whole = Cell(1, cell.tokens * cell.num_ranks, cell.heads, cell.kv_heads, cell.head_dim)
        for num_ranks, shape in ((cell.num_ranks, cell), (1, whole)):
            request = {"do": "open", "cell": shape.as_dict(), "seed": self._seed}
            answers = self._ask(num_ranks, request)
            problem = _problem(answers)
            if problem:
                raise RuntimeError(f"{cell.name}: {problem}")
            if "multiprocessors" in answers[0]:
                name = "whole_multiprocessors" if shape is whole else "rank_multiprocessors"
                self._entry(cell)[name] = answers[0]["multiprocessors"]

    def _ask(self, num_ranks: int, request: dict[str, Any]) -> list[dict[str, Any]]:
        """No answer may take much longer than the budget."""
        left_s = max(PATIENCE_S, self._end - time.monotonic() + PATIENCE_S)
        return self._groups[num_ranks].ask(request, min(self._timeout_s, left_s))

    def _ask_all(self, cell: Cell, request: dict[str, Any]) -> None:
        for num_ranks in {1, cell.num_ranks}:
            self._ask(num_ranks, request)

    def _take_turns(self, cell: Cell, columns: list[Column], turns: int) -> None:
        """The first turn warms up and tells how many calls and turns the others make."""
        paces: dict[tuple[Column, str], _Pace] = {}
        for turn in range(turns + 1):
            for column in list(columns):
                for of in PASSES:
                    pace = paces.get((column, of), _Pace(1, turns))
                    if turn > pace.turns or (turn > 1 and self._over()):
                        continue
                    request = {"do": "time", "of": of, "calls": pace.calls}
                    case = self._guarded(cell, column, request, reopen=columns)
                    if case is None or case["status"] != "ok":
                        self._keep(cell, column, case) if case else None
                        columns.remove(column)
                        break
                    if turn:
                        self._append(cell, column, of, case["by_rank"])
                    else:
                        paces[column, of] = _Pace.of(max(case["by_rank"]["ms"]) / 1e3, turns)
            self._write()

    def _trace(self, cell: Cell, column: Column, folder: Path, reopen: Sequence[Column]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{cell.key}.{column.name.replace('/', '-')}.json"
        paths = [target.with_suffix(f".rank{rank}.json") for rank in range(cell.num_ranks)]
        ranks = self._groups[cell.num_ranks]
        requests = [
            {"do": "trace", "column": column.name, "path": str(path.resolve())} for path in paths
        ]
        try:
            problem = _problem(ranks.ask_each(requests))
        except RanksFailed as error:
            problem = str(error)
            self._replace(cell, cell.num_ranks, reopen, error)
        if problem:
            print(f"{cell.name}: {column.name}: no trace: {problem}", flush=True)
            return
        merge_traces(paths, target, {"cell": cell.as_dict(), "column": column.name})

    # -- asking, and what to do about failures --------------------------------------------------

    def _guarded(
        self, cell: Cell, column: Column, request: dict[str, Any], reopen: Sequence[Column]
    ) -> dict[str, Any] | None:
        """The ranks' answers as one; a group that is lost is replaced, and its columns opened."""
        num_ranks = 1 if column.family == "alone" else cell.num_ranks
        try:
            return _joined(self._ask(num_ranks, request | {"column": column.name}))
        except RanksFailed as error:
            self._keep(cell, column, {"status": "failed", "message": str(error)})
            others = [other for other in reopen if other != column]
            self._replace(cell, num_ranks, others, error)
            return None

    def _replace(
        self, cell: Cell, num_ranks: int, columns: Sequence[Column], lost: RanksFailed
    ) -> None:
        """Another group in place of the one that is lost, with the cell and its columns open."""
        del self._groups[num_ranks]
        if self._over():
            raise lost  # There is no time to start another group.
        self._start(num_ranks)
        self._open(cell)
        for column in columns:
            of_ranks = 1 if column.family == "alone" else cell.num_ranks
            self._ask(of_ranks, {"do": "check", "column": column.name})

    def _start(self, num_ranks: int) -> None:
        alone = num_ranks == 1
        environments = [self._node.alone()] if alone else self._node.environments(num_ranks)
        self._groups[num_ranks] = Ranks([str(WORKER)], environments, self._timeout_s)

    def _over(self) -> bool:
        return time.monotonic() > self._end

    # -- what is kept ---------------------------------------------------------------------------

    def _missing(self, cell: Cell, columns: Sequence[Column]) -> list[Column]:
        """Failures are tried again."""
        done = self._cases(cell)
        return [c for c in columns if not is_measured(done.get(c.name))]

    def _entry(self, cell: Cell) -> dict[str, Any]:
        for entry in self.results["cells"]:
            if entry["cell"] == cell.as_dict():
                return entry
        self.results["cells"].append({"cell": cell.as_dict(), "columns": {}})
        return self.results["cells"][-1]

    def _cases(self, cell: Cell) -> dict[str, Any]:
        return self._entry(cell)["columns"]

    def _keep(self, cell: Cell, column: Column, case: dict[str, Any]) -> None:
        self._cases(cell)[column.name] = case | {"run": len(self.results["runs"]) - 1}
        if case["status"] != "ok":
            print(f"{cell.name}: {column.name}: {case['message']}", flush=True)
        self._write()

    def _append(self, cell: Cell, column: Column, of: str, by_rank: dict[str, list]) -> None:
        case = self._cases(cell)[column.name]
        for name, values in by_rank.items():
            case.setdefault(f"{of}_{name}", []).append(values)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.results) + "\n")

    def _line(self, cell: Cell, column: Column) -> str:
        case = self._cases(cell)[column.name]
        if not is_measured(case):
            return case["status"]
        return "; ".join(time_text(case, of) for of in PASSES)


def is_measured(case: dict[str, Any] | None) -> bool:
    return case is not None and case["status"] == "ok" and f"{PASSES[-1]}_ms" in case


def turns_ms(case: dict[str, Any], of: str) -> list[float]:
    """Each turn's slowest rank."""
    return [max(by_rank) for by_rank in case[f"{of}_ms"]]


def median_ms(case: dict[str, Any], of: str) -> float:
    return statistics.median(turns_ms(case, of))


def spread_ms(case: dict[str, Any], of: str) -> float | None:
    """Half of the range over the turns; None: there was only one."""
    times = turns_ms(case, of)
    return (max(times) - min(times)) / 2 if len(times) > 1 else None


def time_text(case: dict[str, Any], of: str) -> str:
    spread = spread_ms(case, of)
    text = f"{median_ms(case, of):.2f}"
    return text if spread is None else f"{text} ± {spread:.2f}"


def slowest_rank(case: dict[str, Any], of: str) -> int:
    """By the median of each rank's own times."""
    medians = [statistics.median(times) for times in zip(*case[f"{of}_ms"], strict=True)]
    return medians.index(max(medians))


@dataclass(frozen=True, slots=True)
class _Pace:
    """How often a column is called: calls in a turn, and turns."""

    calls: int
    turns: int

    @staticmethod
    def of(call_s: float, turns: int) -> _Pace:
        calls = max(1, min(MAX_CALLS, math.ceil(CALLS_S / call_s)))
        return _Pace(calls, min(turns, SLOW_TURNS) if call_s > SLOW_S else turns)


def _problem(answers: Sequence[dict[str, Any]]) -> str | None:
    for rank, answer in enumerate(answers):
        if answer["status"] != "ok":
            return f"rank {rank}: {answer['message']}"
    return None


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One case from the ranks' answers: numbers by rank, errors the largest."""
    problem = _problem(answers)
    if problem:
        status = WRONG if any(answer["status"] == WRONG for answer in answers) else "failed"
        return {"status": status, "message": problem}
    joined: dict[str, Any] = {"status": "ok"}
    if "errors" in answers[0]:
        names = answers[0]["errors"]
        joined["errors"] = {name: max(a["errors"][name] for a in answers) for name in names}
    for name in ("sent_bytes", "allocated_bytes"):
        if name in answers[0]:
            joined[name] = [answer[name] for answer in answers]
    by_rank = {n: [a[n] for a in answers] for n in ("ms", "issue_ms") if n in answers[0]}
    return joined | {"by_rank": by_rank} if by_rank else joined
