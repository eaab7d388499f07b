"""The table and the plot of tools/bench_node.py attention."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_node_attention import is_measured, median_ms, slowest_rank, time_text
from bench_node_cells import NOTHING, PASSES, Cell, Column

TITLES = {"forward": "forward", "both": "forward + backward"}
BASELINE = Column("te", schedule="p2p")
MB = 1e6
BOUND_HEAD = "% of bound (with the ranks' multiprocessors)"


class Measured:
    """One cell's results with what is computed from them."""

    def __init__(self, entry: dict[str, Any], num_gpus: int) -> None:
        self.cell = Cell(**entry["cell"])
        self.cases: dict[str, Any] = entry["columns"]
        self._num_gpus = num_gpus
        whole, own = (entry.get(f"{name}_multiprocessors") for name in ("whole", "rank"))
        # What the ranks have of the multiprocessors that the bound has; None: GPUs of their own.
        shared = whole and own and num_gpus == 1
        self._share = self.cell.num_ranks * own / whole if shared else None

    def columns(self) -> Iterator[Column]:
        for name, case in self.cases.items():
            if is_measured(case):
                yield Column.parse(name)

    def ms(self, column: Column, of: str) -> float | None:
        case = self.cases.get(column.name)
        return median_ms(case, of) if is_measured(case) else None

    def bound_ms(self, column: Column, of: str) -> float | None:
        """What one process needs on the whole GPU, or on each of P GPUs for a P-th of it."""
        alone_ms = self.ms(column.bound, of)
        if alone_ms is None:
            return None
        return alone_ms / self.cell.num_ranks if self._num_gpus > 1 else alone_ms

    def tflops(self, column: Column, of: str) -> float | None:
        """Per rank; of ``alone`` what each of P ranks would have to do to keep up."""
        ms = self.ms(column, of) if column.family != "alone" else self.bound_ms(column, of)
        return None if ms is None else self.cell.flops_per_rank(of) / ms / 1e9

    def percent(self, column: Column, of: str) -> float | None:
        ms, bound_ms = self.ms(column, of), self.bound_ms(column, of)
        return None if ms is None or bound_ms is None else 100 * bound_ms / ms

    def share_percent(self, column: Column, of: str) -> float | None:
        """As ``percent``, of a bound that has no more multiprocessors than the ranks together."""
        percent = self.percent(column, of)
        return None if percent is None or self._share is None else percent / self._share

    def gain(self, column: Column, of: str) -> float | None:
        """Times as fast as the baseline."""
        ms, baseline_ms = self.ms(column, of), self.ms(BASELINE, of)
        return None if ms is None or baseline_ms is None else baseline_ms / ms

    def hidden_percent(self, column: Column, of: str) -> float | None:
        """1 - (both - compute) / transfers: the share of the transfers' time that is not seen."""
        if column.family != "ours":
            return None
        ms = self.ms(column, of)
        compute = self.ms(Column("ours", column.schedule, NOTHING, column.kernel), of)
        transfers = self.ms(Column("ours", column.schedule, column.comm, NOTHING), of)
        if None in (ms, compute, transfers) or NOTHING in (column.comm, column.kernel):
            return None
        return 100 * (1 - (ms - compute) / transfers)

    def sent_mb(self, column: Column, of: str) -> float | None:
        """Mean over the ranks."""
        sent = self.cases[column.name].get("sent_bytes")
        if not sent or column.comm == NOTHING:
            return None
        return statistics.mean(by[0] if of == "forward" else sum(by) for by in sent) / MB


def measured(results: dict[str, Any]) -> list[Measured]:
    num_gpus = results["runs"][-1].get("num_gpus", 1) if results["runs"] else 1
    return [Measured(entry, num_gpus) for entry in results["cells"]]


def table(results: dict[str, Any]) -> str:
    """Markdown: what ran where, and a row per cell and column."""
    heads = ["", "column"]
    for of in PASSES:
        heads += [f"{TITLES[of]}, ms", "TFLOP/s per rank", BOUND_HEAD, "× TE p2p", "% hidden"]
    heads += ["slowest rank", "MB sent per rank"]
    lines = [about(results), "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in measured(results):
        lines += [f"| {' | '.join(row)} |" for row in _rows(one)]
    return "\n".join([*lines, *_failures(results)])


def about(results: dict[str, Any]) -> str:
    """The machine and versions of each run, one line each; equal ones once."""
    lines = []
    for run in results["runs"]:
        facts = {k: v for k, v in run.items() if k not in ("command", "date", "device")}
        text = ", ".join([run["device"], *(f"{k} {v}" for k, v in facts.items())])
        if text not in lines:
            lines.append(text)
    return "\n".join(lines)


def _rows(one: Measured) -> Iterator[list[str]]:
    name = one.cell.name
    for column in sorted(one.columns(), key=lambda c: (c.family != "alone", c.family != "te")):
        case = one.cases[column.name]
        row = [name, column.name]
        for of in PASSES:
            row.append(time_text(case, of))
            computes = column.kernel != NOTHING
            row.append(_number(one.tflops(column, of) if computes else None, ".0f"))
            real = computes and column.family != "alone"
            row.append(_percents(one, column, of) if real else "")
            row.append(_number(one.gain(column, of) if real else None, ".3f"))
            row.append(_number(one.hidden_percent(column, of), ".0f"))
        row.append("" if column.family == "alone" else str(slowest_rank(case, "both")))
        row.append(_number(one.sent_mb(column, "both"), ".0f"))
        yield row
        name = ""


def _failures(results: dict[str, Any]) -> Iterator[str]:
    """What could not be measured, each reason once."""
    found: dict[str, dict[str, list[str]]] = {}
    for entry in results["cells"]:
        for name, case in entry["columns"].items():
            if case["status"] != "ok":
                first = case["message"].splitlines()[0]
                found.setdefault(first, {}).setdefault(name, []).append(Cell(**entry["cell"]).name)
    for message, columns in found.items():
        where = dict.fromkeys(cell for cells in columns.values() for cell in cells)
        yield f"\n{', '.join(columns)} ({'; '.join(where)}): {message}"


def _percents(one: Measured, column: Column, of: str) -> str:
    share = one.share_percent(column, of)
    text = _number(one.percent(column, of), ".1f")
    return text if share is None else f"{text} ({share:.1f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def plot(results: dict[str, Any], path: Path) -> None:
    """Forward and forward + backward: TFLOP/s per rank of the best of each family, cell by cell."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = measured(results)
    width = 3 + 1.1 * len(cells)
    figure, both_axes = pyplot.subplots(2, 1, figsize=(width, 8), layout="constrained")
    for axes, of in zip(both_axes, PASSES, strict=True):
        families = sorted({family for one in cells for family in _best(one, of)})
        for idx, family in enumerate(families):
            at = [i + (idx - len(families) / 2) * 0.8 / len(families) for i in range(len(cells))]
            heights = [_best(one, of).get(family, 0.0) for one in cells]
            axes.bar(at, heights, 0.8 / len(families), align="edge", label=family)
        axes.set_xticks(range(len(cells)), [one.cell.name for one in cells], fontsize=7)
        axes.set(ylabel="TFLOP/s per rank", title=f"{TITLES[of]}, causal")
        axes.legend(fontsize=7, ncols=4)
    figure.savefig(path, dpi=120)


def _best(one: Measured, of: str) -> dict[str, float]:
    """By family the fastest column's TFLOP/s: bound, stock by type, ours by kernel."""
    best: dict[str, float] = {}
    for column in one.columns():
        if column.kernel == NOTHING:
            continue
        family = {"alone": f"bound {column.kernel}", "te": f"TE {column.schedule}"}.get(
            column.family,
            f"no communication {column.kernel}"
            if column.comm == NOTHING
            else f"ours {column.kernel}",
        )
        best[family] = max(best.get(family, 0.0), one.tflops(column, of) or 0.0)
    return best
