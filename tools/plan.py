#!/usr/bin/env python
"""Print, price and draw a plan: which rank computes which block of attention in which step.

    python tools/plan.py --ranks 8
    python tools/plan.py --ranks 8 --schedule ring --seq 65536 --heads 32 --kv-heads 4
    python tools/plan.py --ranks 8 --compare ring --png balanced_p8.png
    python tools/plan.py --ranks 8 --json --full > plan.json
    python tools/plan.py --validate plan.json
    python tools/plan.py --measured trace.json --png measured.png

In the table, rows are ranks and columns are steps; q5·k0* is a task that the rank does for another
one (queries of chunk 5 × keys of chunk 0), [h0:4] a part of the KV heads, (0:64) of the rows, ~ a
step of transfers alone and + one of merges alone.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

if importlib.util.find_spec("megatron_distflash") is None:  # run from a checkout, not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_distflash.plan import (
    SCHEDULES,
    Mask,
    Plan,
    PlanCost,
    PlanError,
    build,
    build_backward,
    cost,
    validate,
)
from megatron_distflash.plan.cost import bytes_per_chunk
from megatron_distflash.plan.grid import format_grid
from megatron_distflash.plan.timing import simulate

TOKENS_PER_RANK = 8192
BF16_BYTES = 2
MIB = 2**20
CHUNK_TIMES = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2))  # in blocks' time


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan to show, in the direction asked for, and the figures of both directions."""

    plan: Plan
    figures: PlanCost


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="plan.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="P", help="context-parallel ranks")
    add("--schedule", default="balanced", choices=list(SCHEDULES), metavar="NAME",
        help=f"{', '.join(SCHEDULES)} (default: %(default)s)")  # fmt: skip
    add("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    add("--kv-heads", type=int, default=8, help="key and value heads (default: %(default)s)")
    add("--head-dim", type=int, default=128, help="for sizes in bytes (default: %(default)s)")
    add("--seq", type=int, metavar="N",
        help=f"tokens in the whole sequence (default: {TOKENS_PER_RANK} per rank)")  # fmt: skip
    add("--mask", default="causal", metavar="MASK",
        help="causal, full, window:N (a token sees itself and the N - 1 before it) or "
        "documents:A,B,... (causal documents of A, B, ... tokens); default: causal")  # fmt: skip
    add("--backward", action="store_true", help="show the backward plan")
    add("--json", action="store_true", help="print arguments and figures as JSON")
    add("--full", action="store_true", help="with --json: print the plan too")
    add("--png", type=Path, metavar="FILE", help="draw the plan as a timeline (needs matplotlib)")
    add("--compare", choices=list(SCHEDULES), metavar="NAME",
        help="with --png: draw this schedule below, on the same time axis")  # fmt: skip
    add("--validate", type=Path, metavar="FILE",
        help="check the plan in a JSON file (as --json --full prints it) and show it")  # fmt: skip
    add("--measured", type=Path, metavar="FILE",
        help="say where the time went in a trace of tools/bench_node.py attention --trace; with "
        "--png draw it below the plan")  # fmt: skip
    return parser


# ---- from arguments to plans ------------------------------------------------------------------


def parse_mask(text: str, num_tokens: int) -> Mask:
    """The mask that ``--mask`` names; ValueError if it names none."""
    name, _, value = text.partition(":")
    if name in ("causal", "full") and not value:
        return Mask.causal() if name == "causal" else Mask.full()
    try:
        numbers = [int(number) for number in value.split(",")]
    except ValueError:
        numbers = []
    if name == "window" and len(numbers) == 1:
        return Mask.sliding_window(numbers[0])
    if name == "documents" and numbers:
        ends = tuple(sum(numbers[:count]) for count in range(len(numbers) + 1))
        if ends[-1] != num_tokens:
            raise ValueError(f"the documents have {ends[-1]} tokens, the sequence {num_tokens}")
        return Mask.packed(ends)
    raise ValueError(f"unknown mask {text!r}: give causal, full, window:N or documents:A,B,...")


def rank_lengths(num_tokens: int, num_ranks: int) -> tuple[int, ...]:
    """Tokens per rank, as equal as can be; the first ranks get what is left over."""
    share, left_over = divmod(num_tokens, num_ranks)
    return tuple(share + (rank < left_over) for rank in range(num_ranks))


def build_priced(args: argparse.Namespace, schedule: str) -> Priced:
    """Build the plan that the arguments ask for. ValueError if they ask for none."""
    options = {
        "num_heads": args.heads,
        "num_kv_heads": args.kv_heads,
        "mask": parse_mask(args.mask, args.seq),
    }
    lengths = rank_lengths(args.seq, args.ranks)
    plan = build(schedule, lengths, **options)
    shown = build_backward(schedule, lengths, **options) if args.backward else plan
    return Priced(shown, cost(plan))


def check_arguments(args: argparse.Namespace) -> None:
    """Complete the arguments; ValueError if they make no sense together."""
    sources = (args.ranks, args.validate, args.measured)
    if sum(source is not None for source in sources) != 1:
        raise ValueError("give one of --ranks P, --validate FILE and --measured FILE")
    if args.full and not args.json:
        raise ValueError("--full does nothing without --json")
    if args.compare and not args.png:
        raise ValueError("--compare does nothing without --png FILE")
    if args.validate and (args.json or args.png or args.backward):
        raise ValueError("--validate FILE goes with no other option")
    if args.measured and (args.json or args.compare or args.backward):
        raise ValueError("--measured FILE goes with no other option than --png FILE")
    if args.validate or args.measured:
        return
    if args.seq is None:
        args.seq = TOKENS_PER_RANK * args.ranks
    for name in ("ranks", "heads", "kv_heads", "head_dim", "seq"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


# ---- what is printed --------------------------------------------------------------------------


def as_json(args: argparse.Namespace, priced: Priced) -> str:
    """Arguments, figures and with ``--full`` the plan as one JSON object."""
    names = ("ranks", "schedule", "heads", "kv_heads", "head_dim", "seq", "mask")
    report = {name: getattr(args, name) for name in names}
    report["direction"] = str(priced.plan.direction)
    report["bf16_bytes_per_chunk"] = bytes_per_chunk(priced.plan, args.head_dim, BF16_BYTES)
    report |= priced.figures.as_dict()
    if args.full:
        report["plan"] = json.loads(priced.plan.to_json())
    return json.dumps(report, indent=None if args.full else 2)


def as_text(args: argparse.Namespace, priced: Priced) -> str:
    """The table and the figures for the screen."""
    plan, figures = priced.plan, priced.figures
    chunk_mib = bytes_per_chunk(plan, args.head_dim, BF16_BYTES) / MIB

    def sizes(mean: float, most: float) -> str:
        return (
            f"{mean:.4g} chunks a rank ({mean * chunk_mib:,.4g} MiB), "
            f"at most {most:.4g} ({most * chunk_mib:,.4g} MiB)"
        )

    def buffers(chunks: float) -> str:
        return f"{chunks:.4g} chunks ({chunks * chunk_mib:,.4g} MiB)"

    heads = f"{args.heads} query and {args.kv_heads} KV heads"
    ranks = f"{args.ranks} rank{'s' if args.ranks > 1 else ''}"
    title = f"{plan.schedule} {plan.direction}: {ranks}, {args.seq:,} tokens"
    tail = f", and {figures.tail_steps} to bring results home" if figures.tail_steps else ""
    rows = [
        ("steps", f"{figures.steps}{tail}"),
        ("critical path", f"{figures.critical_path:.4g} blocks of n × n (n = tokens per rank)"),
        ("idle", f"{figures.idle_fraction:.1%} of the ranks' time"),
        ("exposed", exposed(plan)),
        ("sent forward", sizes(figures.volume_forward_mean, figures.volume_forward_max)),
        ("sent backward", sizes(figures.volume_backward_mean, figures.volume_backward_max)),
        ("messages forward", f"at most {figures.messages_forward_max} a rank"),
        ("buffers forward", buffers(figures.live_buffers_forward)),
        ("buffers backward", buffers(figures.live_buffers_backward)),
        ("one chunk", f"n tokens × all query heads: {chunk_mib:,.4g} MiB in bf16"),
    ]
    lines = [f"{title}, {heads}, {plan.mask} mask", "", format_grid(plan), ""]
    return "\n".join(lines + [f"{name:<17} {text}" for name, text in rows])


def exposed(plan: Plan) -> str:
    """The share of the time that transfers add, by how fast they are next to a block."""
    shares = (f"{simulate(plan, float(time)).exposed:.1%} at {time}" for time in CHUNK_TIMES)
    return f"{', '.join(shares)} blocks' time a chunk"


def validate_file(path: Path) -> str:
    """The grid of the plan in the file, once it is proved right.

    Raises ValueError or OSError if the file holds no plan, PlanError if the plan is wrong.
    """
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
        report = data if isinstance(data, dict) else {}
        plan = Plan.from_json(json.dumps(report.get("plan", data)))
    except ValueError as error:
        raise ValueError(f"{path} holds no plan as --json --full prints it: {error}") from error
    validate(plan)
    return f"{path}: a valid {plan.schedule} {plan.direction} plan\n\n{format_grid(plan)}"


def draw(args: argparse.Namespace, priced: Priced) -> None:
    """Write the picture. ValueError if matplotlib is missing."""
    _check_matplotlib()
    from plan_timeline import draw_timelines

    shown = [priced] + ([build_priced(args, args.compare)] if args.compare else [])
    draw_timelines([(each.plan, each.figures) for each in shown], args.png)


def measured_text(args: argparse.Namespace) -> str:
    """What the trace shows, drawn too if asked for. ValueError if it shows no plan."""
    from plan_trace import as_text, read_trace

    title, measured = read_trace(args.measured)
    if args.png:
        _check_matplotlib()
        from plan_timeline import draw_measured

        draw_measured(measured, title, args.png)
    return as_text(title, measured)


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--png needs matplotlib, which is not installed: pip install matplotlib"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check_arguments(args)
        if args.validate:
            return _main_validate(args.validate)
        if args.measured:
            print(measured_text(args))
            return 0
        priced = build_priced(args, args.schedule)
        if args.png:
            draw(args, priced)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(as_json(args, priced) if args.json else as_text(args, priced))
    return 0


def _main_validate(path: Path) -> int:
    """Exit status 1 and the proof's complaint for a plan that is wrong."""
    try:
        print(validate_file(path))
    except PlanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
