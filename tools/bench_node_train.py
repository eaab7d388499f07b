"""The launcher's side of tools/bench_node.py train: rows of bench_train.py on several ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_node_report import about
from bench_ranks import Node
from bench_train import GB, Bench, Worker, cell, find_case, longest_tokens
from bench_train_row import ROWS

DEFAULT_ROWS = (
    "stock-full",
    "ours-remat",
    "stock-tp-full",
    "stock-none",
    "ours-none",
    "stock-tp-none",
)


def run(
    path: Path,
    node: Node,
    rows: Sequence[str],
    ranks: Sequence[int],
    tokens: Sequence[int],
    *,
    shape: str,
    options: dict[str, Any],
    budget_s: float,
    timeout_s: float,
) -> dict[str, Any]:
    """Measure what is missing; returns all results.

    Args:
        tokens: of the whole sequence.
        options: of ours, besides the rows'.
    """
    bench = Bench(path, shape, budget_s)
    for num_ranks in ranks:
        make = _maker(node, num_ranks, options)
        facts = node.about() | {"options": options}
        bench = Bench(path, shape, bench.left_s(), num_ranks, make, facts)
        bench.run(rows, tokens, timeout_s)
    return bench.results


def _maker(node: Node, num_ranks: int, options: dict[str, Any]) -> Callable[..., Worker]:
    def make(row: str, shape: str, timeout_s: float) -> Worker:
        environments = node.environments(num_ranks)
        return Worker(row, shape, timeout_s, environments, options)

    return make


def table(results: dict[str, Any]) -> str:
    """Markdown: a row per number of ranks and way to train, a column per length.

    Each is compared with stock context parallelism and the same recomputation. The longest sequence
    that would fit is told where every rank has a GPU of its own.
    """
    cases = results["cases"]
    own_gpus = any(run["num_gpus"] > 1 for run in results["runs"])
    lengths = sorted({case["tokens"] for case in cases})
    heads = ["", "", *(f"{n / 1024:g}k tokens" for n in lengths), "loss"]
    heads += ["longest"] if own_gpus else []
    lines = [about(results), "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for num_ranks in sorted({case["ranks"] for case in cases}):
        own = [case for case in cases if case["ranks"] == num_ranks]
        for row in [row for row in ROWS if any(case["row"] == row for case in own)]:
            baseline = "stock-none" if ROWS[row].recompute == "none" else "stock-full"
            found = [find_case(own, row, n) for n in lengths]
            cells = [
                cell(case, find_case(own, baseline, n))
                for case, n in zip(found, lengths, strict=True)
            ]
            losses = [f"{case['loss']:.4f}" for case in found if case and "loss" in case]
            texts = [f"P = {num_ranks}", row, *cells, ", ".join(losses)]
            if own_gpus:
                longest = longest_tokens([case for case in own if case["row"] == row])
                texts.append("" if longest is None else f"≈ {longest / 1024:.0f}k")
            lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Time per iteration and the peak of the rank that needs most, a bar per row."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    good = [case for case in results["cases"] if case["status"] == "ok"]
    places = sorted({(case["ranks"], case["tokens"]) for case in good})
    rows = [row for row in ROWS if any(case["row"] == row for case in good)]
    figure, axes = pyplot.subplots(1, 2, figsize=(5 + 2 * len(places), 4), layout="constrained")
    for axis, value_of, label in (
        (axes[0], lambda case: 1e3 * statistics.median(case["iteration_s"]), "ms per iteration"),
        (axes[1], lambda case: case["peak_bytes"] / GB, "peak memory of a rank, GB"),
    ):
        for idx, row in enumerate(rows):
            width = 0.8 / len(rows)
            found = {(c["ranks"], c["tokens"]): c for c in good if c["row"] == row}
            heights = [value_of(found[place]) if place in found else 0.0 for place in places]
            at = [place + (idx - len(rows) / 2) * width for place in range(len(places))]
            axis.bar(at, heights, width, align="edge", label=row)
        names = [f"P = {ranks}, {tokens // 1024}k" for ranks, tokens in places]
        axis.set_xticks(range(len(places)), names)
        axis.set(ylabel=label)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
