#!/usr/bin/env python
"""Time training with activation recomputation, stock Megatron and ours, on one GPU.

Each row of the table is one way to train a few layers (see ROWS in bench_train_row.py); each
column a sequence length. Losses and gradient norms of the rows must agree before anything is timed.

    python tools/bench_train.py                          # every row, 32k to 256k tokens
    python tools/bench_train.py --rows stock-full ours-remat --tokens 131072
    python tools/bench_train.py --report                 # table and plot of what was measured

Results go to --json after every case, and a case that is there already is not run again. Needs
megatron-core and Transformer Engine. On a machine without a GPU it runs on CPU ranks to show that
it works (--shape tiny); timings mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_ranks import Ranks, RanksFailed, environment, worker_environment
from bench_train_row import OUT_OF_MEMORY, ROWS, SHAPES

HERE = Path(__file__).resolve().parent
DEFAULT_ROWS = (
    "stock-none",
    "stock-full",
    "stock-core-attn",
    "ours-none",
    "ours-no-remat",
    "ours-remat",
    "ours-remat-cudnn",
    "ours-offload",
)
BASELINE = "stock-full"
GB = 1e9
ALIGN_TOKENS = 1024

# bf16 rounds each of some 300 additions per output differently in every kernel; fp8 linear layers
# round to 3 bits. Losses are near ln(vocabulary), 9.
LOSS_TOLERANCE = 0.01
GRAD_NORM_TOLERANCE = 0.02
# Tensor parallelism draws its parts of the weights by other generators: another random model.
LOOSE_FACTOR = 5

TIMED_S = 3.0  # Time to spend on the iterations of one case,
MAX_ITERATIONS = 5  # of which there are at most so many.
LONG_ITERATION_S = 15.0  # From here on the iteration that checks is also the one that counts.


class Worker:
    """The processes of one row, one per rank. They import at once with those of the other rows, and
    take the GPU at their first request.

    Args:
        environments: one per rank; None: one process.
        options: of ours, besides the row's.
    """

    def __init__(
        self,
        row: str,
        shape: str,
        timeout_s: float,
        environments: Sequence[dict[str, str]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.row = row
        command = [str(HERE / "bench_train_row.py"), row, shape, json.dumps(options or {})]
        self._ranks = Ranks(command, environments or [worker_environment()], timeout_s)
        self._lost: RanksFailed | None = None

    def wait_ready(self) -> None:
        """Until it has imported. ``ask`` says if that failed."""
        try:
            self._ranks.wait_ready()
        except RanksFailed as error:
            self._lost = error

    def ask(self, num_tokens: int, num_iterations: int) -> dict[str, Any]:
        """Run iterations; the answer's status says how it went."""
        if self._lost is not None:
            return {"status": "failed", "message": str(self._lost)}
        try:
            answers = self._ranks.ask({"tokens": num_tokens, "iterations": num_iterations})
        except RanksFailed as error:
            answers = [a for a in error.answers if a["status"] == OUT_OF_MEMORY]
            return answers[0] if answers else {"status": "failed", "message": str(error)}
        return joined(answers)

    def close(self) -> None:
        """Wait until the processes are gone and their GPU memory with them."""
        self._ranks.close()


def joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One case of the ranks' answers: the slowest of each iteration, the largest peak."""
    for answer in answers:
        if answer["status"] != "ok":
            return answer
    times = zip(*(answer["iteration_s"] for answer in answers), strict=True)
    case = dict(answers[0]) | {"iteration_s": [max(ranks) for ranks in times]}
    for name in ("static_bytes", "peak_bytes", "peak_reserved_bytes"):
        case[name] = max(answer[name] for answer in answers)
    case["usable_bytes"] = min(answer["usable_bytes"] for answer in answers)
    return case


class Bench:
    """Runs cases and keeps their results in a file, which also says what is done already."""

    def __init__(
        self,
        path: Path,
        shape: str,
        budget_s: float,
        num_ranks: int = 1,
        make_worker: Callable[..., Worker] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            about: what the results are to say of the machine, besides ``environment``.
            make_worker: (row, shape, timeout_s) → the process or processes of a row.
        """
        self._path, self._shape, self._num_ranks = path, shape, num_ranks
        self._make_worker = Worker if make_worker is None else make_worker
        self._about = about or {}
        self._end = time.monotonic() + budget_s
        self.results: dict[str, Any] = {"shape": shape, "runs": [], "cases": []}
        if path.exists():
            self.results = json.loads(path.read_text())
            if self.results["shape"] != shape:
                raise ValueError(
                    f"{path} holds results of --shape {self.results['shape']}: choose another "
                    "--json."
                )

    def run(self, rows: Sequence[str], lengths: Sequence[int], timeout_s: float) -> None:
        """Measure what is missing, row by row, each from the shortest length to the longest."""
        todo = {row: [n for n in sorted(lengths) if not self._done(row, n)] for row in rows}
        workers = {row: self._make_worker(row, self._shape, timeout_s) for row in rows if todo[row]}
        if workers:
            self.results["runs"].append(environment() | self._about)
        for worker in workers.values():
            worker.wait_ready()  # Imports of the others would slow the host of the first row.
        for row, worker in workers.items():
            for num_tokens in todo[row]:
                case = self._measure(worker, num_tokens)
                if case is None:
                    continue
                self._add({"row": row, "ranks": self._num_ranks, "tokens": num_tokens} | case)
                if case["status"] != "ok":
                    break
            worker.close()

    def left_s(self) -> float:
        """What is left of the budget."""
        return self._end - time.monotonic()

    def _done(self, row: str, num_tokens: int) -> bool:
        """Failures are tried again; what is longer than what did not fit is not tried."""
        for case in self._own_cases():
            if case["row"] == row:
                if case["tokens"] == num_tokens and case["status"] == "ok":
                    return True
                if case["tokens"] <= num_tokens and case["status"] == OUT_OF_MEMORY:
                    return True
        return False

    def _measure(self, worker: Worker, num_tokens: int) -> dict[str, Any] | None:
        """One case; None if there is no time left for it."""
        expected_s = self._expected_s(worker.row, num_tokens)
        if time.monotonic() + 1.5 * expected_s > self._end:
            print(f"{worker.row}, {num_tokens} tokens: not run, the time is up", flush=True)
            return None
        checked = worker.ask(num_tokens, 1)
        if checked["status"] == "ok":
            self._check(worker.row, num_tokens, checked)
        if checked["status"] != "ok" or expected_s > LONG_ITERATION_S:
            return checked
        # The first iteration at a length also compiles and tunes kernels: it tells no time.
        if not expected_s:
            checked = worker.ask(num_tokens, 1)
            if checked["status"] != "ok":
                return checked
        iteration_s = expected_s or checked["iteration_s"][0]
        return worker.ask(num_tokens, max(1, min(MAX_ITERATIONS, int(TIMED_S / iteration_s))))

    def _expected_s(self, row: str, num_tokens: int) -> float:
        """About what an iteration will take: as long as another row's, or else what a shorter one
        took, by the square of the length, which is how attention grows; 0 if nothing is known."""
        alike = [c for c in self._own_cases() if c["tokens"] == num_tokens and _ok(c)]
        if alike:
            return max(statistics.median(case["iteration_s"]) for case in alike)
        shorter = [c for c in self._good(row) if c["tokens"] < num_tokens]
        if not shorter:
            return 0.0
        last = max(shorter, key=lambda c: c["tokens"])
        return statistics.median(last["iteration_s"]) * (num_tokens / last["tokens"]) ** 2

    def _check(self, row: str, num_tokens: int, answer: dict[str, Any]) -> None:
        """The row computes what the first one at this length computed."""
        others = [c for c in self._own_cases() if c["tokens"] == num_tokens and _ok(c)]
        if not others:
            return
        reference = others[0]
        own, other = ROWS[row], ROWS[reference["row"]]
        factor = 1 if (own.fp8, own.parallel) == (other.fp8, other.parallel) else LOOSE_FACTOR
        loss_diff = abs(answer["loss"] - reference["loss"])
        norm_diff = abs(answer["grad_norm"] / reference["grad_norm"] - 1)
        agree = loss_diff <= factor * LOSS_TOLERANCE and norm_diff <= factor * GRAD_NORM_TOLERANCE
        if not agree:  # Nor does a NaN.
            answer["status"] = "wrong"
            answer["message"] = (
                f"loss {answer['loss']} and gradient norm {answer['grad_norm']}, but "
                f"{reference['row']} has {reference['loss']} and {reference['grad_norm']}"
            )

    def _good(self, row: str) -> list[dict[str, Any]]:
        return [case for case in self._own_cases() if case["row"] == row and _ok(case)]

    def _own_cases(self) -> list[dict[str, Any]]:
        """Those of as many ranks."""
        return [case for case in self.results["cases"] if case.get("ranks", 1) == self._num_ranks]

    def _add(self, case: dict[str, Any]) -> None:
        others = [c for c in self.results["cases"] if _key(c) != _key(case)]
        self.results["cases"] = [*others, case]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"{case['row']}, {case['tokens']} tokens: {cell(case, None)}", flush=True)
        if not _ok(case):
            print(case.get("message", ""), flush=True)


def longest_tokens(cases: Sequence[dict[str, Any]]) -> int | None:
    """The longest sequence that would fit: peak memory grows linearly with the tokens.

    Args:
        cases: those of one row. None if fewer than two were measured.
    """
    good = sorted((c for c in cases if _ok(c)), key=lambda c: c["tokens"])
    if len(good) < 2 or not good[-1]["peak_bytes"]:
        return None
    short, long = good[-2:]
    slope = (long["peak_bytes"] - short["peak_bytes"]) / (long["tokens"] - short["tokens"])
    fitting = long["tokens"] + (long["usable_bytes"] - long["peak_bytes"]) / slope
    too_long = [c["tokens"] for c in cases if c["status"] == OUT_OF_MEMORY]
    return int(min([fitting, *too_long])) // ALIGN_TOKENS * ALIGN_TOKENS


def table(results: dict[str, Any]) -> str:
    """Markdown: a row per way to train, a column per length."""
    cases = results["cases"]
    lengths = sorted({case["tokens"] for case in cases})
    heads = [f"{num_tokens / 1024:g}k" for num_tokens in lengths]
    lines = ["| | " + " | ".join([*heads, "longest"]) + " |", "|---" * (len(lengths) + 2) + "|"]
    for row in [row for row in ROWS if any(case["row"] == row for case in cases)]:
        own = {case["tokens"]: case for case in cases if case["row"] == row}
        cells = [cell(own.get(n), find_case(cases, BASELINE, n)) for n in lengths]
        longest = longest_tokens(list(own.values()))
        cells.append("" if longest is None else f"≈ {longest / 1024:.0f}k")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed relative to the baseline, and peak memory, over the length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    cases = results["cases"]
    for row in [row for row in ROWS if any(case["row"] == row and _ok(case) for case in cases)]:
        good = sorted(
            (c for c in cases if c["row"] == row and _ok(c)), key=lambda case: case["tokens"]
        )
        tokens = [case["tokens"] / 1024 for case in good]
        ratios = [_speedup(case, find_case(cases, BASELINE, case["tokens"])) for case in good]
        speed.plot(tokens, [ratio or math.nan for ratio in ratios], marker="o", label=row)
        memory.plot(tokens, [case["peak_bytes"] / GB for case in good], marker="o", label=row)
    lengths = sorted({case["tokens"] / 1024 for case in cases})
    for axes, label in ((speed, f"speed relative to {BASELINE}"), (memory, "peak memory, GB")):
        axes.set(ylabel=label, xlabel="tokens", xscale="log")
        axes.set_xticks(lengths, [f"{n:g}k" for n in lengths], minor=False)
        axes.minorticks_off()
    memory.legend()
    figure.savefig(path, dpi=120)


def _key(case: dict[str, Any]) -> tuple[str, int, int]:
    return case["row"], case["tokens"], case.get("ranks", 1)


def _ok(case: dict[str, Any] | None) -> bool:
    return case is not None and case["status"] == "ok"


def find_case(cases: Sequence[dict[str, Any]], row: str, num_tokens: int) -> dict[str, Any] | None:
    found = [case for case in cases if (case["row"], case["tokens"]) == (row, num_tokens)]
    return found[0] if found else None


def _speedup(case: dict[str, Any], baseline: dict[str, Any] | None) -> float | None:
    if baseline is None or not _ok(baseline):
        return None
    return statistics.median(baseline["iteration_s"]) / statistics.median(case["iteration_s"])


def cell(case: dict[str, Any] | None, baseline: dict[str, Any] | None) -> str:
    """Median and spread of the time, speed relative to the baseline, peak memory."""
    if case is None:
        return ""
    if not _ok(case):
        return case["status"]
    times_ms = [1e3 * s for s in case["iteration_s"]]
    spread = (max(times_ms) - min(times_ms)) / 2
    text = f"{statistics.median(times_ms):.0f}"
    text += f" ± {spread:.0f} ms" if len(times_ms) > 1 else " ms"
    ratio = _speedup(case, baseline)
    if ratio is not None:
        text += f" ({ratio:.2f}×)"
    return f"{text}, {case['peak_bytes'] / GB:.1f} GB"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=DEFAULT_ROWS, metavar="ROW")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2**n for n in range(15, 19)])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b-layers")
    parser.add_argument("--json", type=Path, default=Path("out/bench_train.json"))
    parser.add_argument("--png", type=Path, help="write a plot (needs matplotlib)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start nothing after that")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one case")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    bench = Bench(args.json, args.shape, args.budget_s)
    if not args.report:
        bench.run(args.rows, args.tokens, args.timeout_s)
    print(table(bench.results))
    if args.png is not None:
        plot(bench.results, args.png)
    return int(any(c["status"] in ("failed", "wrong") for c in bench.results["cases"]))


if __name__ == "__main__":
    sys.exit(main())
