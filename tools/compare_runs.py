#!/usr/bin/env python
"""Compare two training runs of Megatron iteration by iteration: losses and gradient norms.

Both runs must have logged every iteration to TensorBoard (--tensorboard-dir DIR
--tensorboard-log-interval 1), which keeps float32 precision; Megatron's log on screen rounds the
gradient norm to three decimals.

    python tools/compare_runs.py distflash=out/demo/distflash/tensorboard \\
        stock=out/demo/stock/tensorboard --png loss.png

Exits with an error when the losses of an iteration are further apart than --loss-tolerance, or when
the loss does not fall.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS_TAG = "lm loss"
GRAD_NORM_TAG = "grad-norm"


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run logged; the three sequences are as long as each other."""

    name: str
    iterations: tuple[int, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs with the same iterations. Differences are one per iteration."""

    ours: Curve
    reference: Curve

    @property
    def loss_diffs(self) -> tuple[float, ...]:
        """|loss - reference loss|."""
        pairs = zip(self.ours.losses, self.reference.losses, strict=True)
        return tuple(abs(a - b) for a, b in pairs)

    @property
    def grad_norm_rel_diffs(self) -> tuple[float, ...]:
        """|grad norm - reference grad norm| / reference grad norm."""
        pairs = zip(self.ours.grad_norms, self.reference.grad_norms, strict=True)
        return tuple(abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs)


# ---------------------------------------------------------------------------- reading


def read_curve(name: str, folder: Path) -> Curve:
    """The curve that a run logged in a TensorBoard folder.

    Raises ValueError when the folder holds no such log, or the logs of several runs.
    """
    # Imported here, because TensorBoard takes a second and the rest of this file needs none of it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not list(folder.glob("events.out.tfevents.*")):
        raise ValueError(f"{folder} holds no TensorBoard log of the run {name!r}")
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    missing = {LOSS_TAG, GRAD_NORM_TAG} - set(accumulator.Tags()["scalars"])
    if missing:
        raise ValueError(f"the run {name!r} logged no {' and no '.join(sorted(missing))}: {folder}")
    losses = {event.step: event.value for event in accumulator.Scalars(LOSS_TAG)}
    grad_norms = {event.step: event.value for event in accumulator.Scalars(GRAD_NORM_TAG)}
    if len(losses) != len(accumulator.Scalars(LOSS_TAG)):
        raise ValueError(f"{folder} holds the logs of more than one run; keep one")
    iterations = tuple(sorted(losses.keys() & grad_norms.keys()))
    return Curve(
        name,
        iterations,
        tuple(losses[iteration] for iteration in iterations),
        tuple(grad_norms[iteration] for iteration in iterations),
    )


def compare(ours: Curve, reference: Curve) -> Comparison:
    """Pair two curves. Raises ValueError unless they have the same iterations."""
    if ours.iterations != reference.iterations:
        raise ValueError(
            f"the runs have different iterations: {ours.name!r} logged {_span(ours)}, "
            f"{reference.name!r} {_span(reference)}"
        )
    return Comparison(ours, reference)


def _span(curve: Curve) -> str:
    if not curve.iterations:
        return "none"
    return f"{len(curve.iterations)} ({curve.iterations[0]} to {curve.iterations[-1]})"


# ---------------------------------------------------------------------------- judging


def find_problems(comparison: Comparison, loss_tolerance: float) -> list[str]:
    """What is wrong with the runs, a sentence each; empty when they agree and the loss falls."""
    problems = []
    diffs = comparison.loss_diffs
    apart = [idx for idx, diff in enumerate(diffs) if not diff <= loss_tolerance]  # NaN is apart
    if apart:
        idx = apart[0]
        problems.append(
            f"the losses differ by {diffs[idx]:.2e} in iteration {comparison.ours.iterations[idx]} "
            f"({comparison.ours.name} {comparison.ours.losses[idx]:.6f}, "
            f"{comparison.reference.name} {comparison.reference.losses[idx]:.6f}), more than "
            f"{loss_tolerance:g}; so do {len(apart)} of {len(diffs)} iterations"
        )
    first, last = _ends(comparison.ours.losses)
    if not last < first:
        problems.append(
            f"the loss of {comparison.ours.name} does not fall: {first:.4f} on average in the "
            f"first quarter of the run, {last:.4f} in the last"
        )
    return problems


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Mean loss over the first and over the last quarter: single iterations are noisy."""
    quarter = max(1, len(losses) // 4)
    return math.fsum(losses[:quarter]) / quarter, math.fsum(losses[-quarter:]) / quarter


# ---------------------------------------------------------------------------- reporting


def format_table(comparison: Comparison) -> str:
    """One line per iteration: both losses, both gradient norms and how far they are apart."""
    ours, reference = comparison.ours, comparison.reference
    width = max(10, len(ours.name), len(reference.name))
    names = f"{ours.name:>{width}} {reference.name:>{width}}   {'difference':>10}"
    loss, grad_norm = (
        f"{text:-^{len(names)}}" for text in (" loss ", " gradient norm (relative) ")
    )
    lines = [f"{'':>9}   {loss}   {grad_norm}", f"{'iteration':>9}   {names}   {names}"]
    rows = zip(
        ours.iterations, ours.losses, reference.losses, comparison.loss_diffs,
        ours.grad_norms, reference.grad_norms, comparison.grad_norm_rel_diffs,
        strict=True,
    )  # fmt: skip
    for iteration, loss_a, loss_b, loss_diff, norm_a, norm_b, norm_diff in rows:
        lines.append(
            f"{iteration:>9}   {loss_a:>{width}.6f} {loss_b:>{width}.6f}   {loss_diff:>10.2e}   "
            f"{norm_a:>{width}.6f} {norm_b:>{width}.6f}   {norm_diff:>10.2e}"
        )
    return "\n".join(lines)


def summarize(comparison: Comparison) -> dict[str, Any]:
    """The comparison in a few numbers, JSON-serialisable."""
    return {
        "iterations": len(comparison.ours.iterations),
        "loss_first": comparison.ours.losses[0],
        "loss_last": comparison.ours.losses[-1],
        "max_loss_diff": max(comparison.loss_diffs),
        "max_grad_norm_rel_diff": max(comparison.grad_norm_rel_diffs),
    }


def plot(comparison: Comparison, path: Path, loss_tolerance: float, title: str) -> None:
    """Draw both loss curves above their difference (log scale, with the tolerance) as a PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed to write a file
    from matplotlib import pyplot

    ours, reference = comparison.ours, comparison.reference
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    top.set_title(title, loc="left", fontsize=12)
    top.plot(ours.iterations, ours.losses, color="#f28e2b", linewidth=5, alpha=0.55,
             solid_capstyle="round", label=ours.name)  # fmt: skip
    top.plot(reference.iterations, reference.losses, color="#1f3b73", linewidth=1.4,
             label=reference.name)  # fmt: skip
    top.set_ylabel("loss")
    top.legend(frameon=False)

    # A log scale has no zero: losses that are equal as logged get hollow marks at the bottom, below
    # what float32 tells apart at this size.
    floor = 1e-7
    diffs = [max(diff, floor) for diff in comparison.loss_diffs]
    equal = [diff == 0 for diff in comparison.loss_diffs]
    bottom.plot(ours.iterations, diffs, color="#59a14f", linewidth=1, zorder=1)
    bottom.scatter(ours.iterations, diffs, s=16, zorder=2, edgecolors="#59a14f",
                   facecolors=["white" if same else "#59a14f" for same in equal])  # fmt: skip
    if any(equal):
        bottom.scatter([], [], s=16, edgecolors="#59a14f", facecolors="white",
                       label="equal as logged (float32)")  # fmt: skip
        bottom.legend(frameon=False, fontsize=9, loc="center left")
    bottom.axhline(loss_tolerance, color="#b22222", linewidth=1, linestyle="--")
    bottom.annotate(f"tolerance {loss_tolerance:g}", (1, loss_tolerance), (0, -4),
                    xycoords=("axes fraction", "data"), textcoords="offset points",
                    ha="right", va="top", color="#b22222", fontsize=9)  # fmt: skip
    bottom.set_yscale("log")
    bottom.set_ylim(floor / 2, max(loss_tolerance, *diffs) * 5)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("iteration")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


# ---------------------------------------------------------------------------- command line


def _named_folder(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ours", type=_named_folder, metavar="NAME=FOLDER")
    parser.add_argument("reference", type=_named_folder, metavar="NAME=FOLDER")
    parser.add_argument("--loss-tolerance", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="draw the curves and their difference")
    parser.add_argument("--json", type=Path, help="write the summary")
    args = parser.parse_args(argv)
    try:
        comparison = compare(read_curve(*args.ours), read_curve(*args.reference))
    except ValueError as error:
        sys.exit(f"compare_runs.py: {error}")
    print(format_table(comparison))
    if args.png:
        title = f"{comparison.ours.name} and {comparison.reference.name}"
        plot(comparison, args.png, args.loss_tolerance, title)
    if args.json:
        args.json.write_text(json.dumps(summarize(comparison), indent=2) + "\n")
    problems = find_problems(comparison, args.loss_tolerance)
    if problems:
        sys.exit("compare_runs.py: " + "; ".join(problems))


if __name__ == "__main__":
    main()
