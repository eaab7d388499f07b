#!/usr/bin/env python
"""Measure ours against stock on the GPUs of one machine, side by side in one run.

    python tools/bench_node.py attention                     # P = 4, 8, 2; 8k first
    python tools/bench_node.py attention --ranks 4 --tokens 8192 --heads 32/8 --budget-s 120
    python tools/bench_node.py attention --report --png out/node.png
    python tools/bench_node.py train --ranks 4 --tokens 32768 --options comm=nccl
    python tools/bench_node.py all                           # everything, within 10 minutes

With a GPU per rank each rank has its own. With one GPU the ranks share it through MPS, each with
its part of the multiprocessors, all at once: give --nccl-library a libnccl.so.2 of 2.30 or newer,
which several ranks per GPU need. Without a GPU it runs on CPU ranks in float32 to show that it
works; timings mean nothing there.

attention: causal, forward and forward + backward. Columns are SCHEDULE/COMM/KERNEL for ours,
te/TYPE for Transformer Engine's context parallelism and alone/KERNEL for the bound: one process
with the whole sequence on the whole GPU, by that kernel (on several GPUs divided by their number).
COMM "none" is the same plan on random buffers with nothing moved, KERNEL "none" the same transfers
with nothing computed. Each column is compared with torch's attention before it is timed. P times a
P-th of the multiprocessors, rounded, may be less than all: in brackets stands the percentage of a
bound that has no more. Every rank runs with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron demands
with context parallelism on Hopper.

train: whole training iterations of 2 layers of Llama-8B's shape, rows of tools/bench_train.py with
P ranks: stock context parallelism (p2p), stock tensor + sequence parallelism (tp), ours.

all: build, check_native.py, attention, bench_overlap.py and train, with sizes that suit the
machine; results go to --out.

Results go to --json after every cell, and what is there already is not run again. The exit status
is 1 if something computed what it should not, or if training failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_node_all
import bench_node_train
from bench_node_attention import TURNS, AttentionBench
from bench_node_cells import SCHEDULES, STOCK, WRONG, Column, cells, columns
from bench_node_report import plot, table
from bench_ranks import MEGATRON_CONNECTIONS, Mps, Node
from bench_train_row import ROWS, SHAPES

PARTS = tuple(bench_node_all.SHARES)


def heads(text: str) -> tuple[int, int]:
    """``32/8`` → (32, 8)."""
    query, _, kv = text.partition("/")
    return int(query), int(kv)


def add_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, default=[4, 8, 2], help="most important first")
    add("--tokens", nargs="+", type=int, default=[8192, 4096, 16384], help="per rank")
    add("--heads", nargs="+", type=heads, default=[(32, 8), (64, 8), (32, 32)], metavar="H/KV")
    add("--head-dim", type=int, default=128)
    add("--schedules", nargs="+", default=SCHEDULES[:4], choices=SCHEDULES)
    add("--comms", nargs="+", default=["nccl", "copy", "torch"])
    add("--kernels", nargs="+", default=["cudnn", "cuda", "auto"])
    add("--stock", nargs="*", default=STOCK, choices=STOCK)
    add("--columns", nargs="+", metavar="NAME", help="these, instead of all the combinations")
    add("--turns", type=int, default=TURNS)
    add("--trace", type=Path, metavar="DIR", help="write Chrome traces of the columns there")
    add("--trace-columns", nargs="+", metavar="NAME", help="only of these")
    add("--json", type=Path, default=Path("out/bench_node_attention.json"))
    add("--png", type=Path, help="write a plot (needs matplotlib)")


def add_train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    rows = bench_node_train.DEFAULT_ROWS
    add("--ranks", nargs="+", type=int, default=[4, 8], help="most important first")
    add("--tokens", nargs="+", type=int, default=[2**15, 2**16], help="of the whole sequence")
    add("--rows", nargs="+", choices=ROWS, default=rows, metavar="ROW")
    add("--shape", choices=SHAPES, default="llama-8b-2-layers")
    add("--options", nargs="+", type=option, default=[], metavar="NAME=VALUE",
        help="of ours: fields of DistFlashConfig")  # fmt: skip
    add("--json", type=Path, default=Path("out/bench_node_train.json"))
    add("--png", type=Path, help="write a plot (needs matplotlib)")


def option(text: str) -> tuple[str, str]:
    """``comm=nccl`` → ("comm", "nccl")."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"give NAME=VALUE, not {text!r}")
    return name, value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="attention alone")
    add_attention(attention)
    train = commands.add_parser("train", help="training iterations")
    add_train(train)
    everything = commands.add_parser("all", help="build, check and measure everything")
    everything.add_argument("--out", type=Path, default=Path("out/node"))
    everything.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    everything.add_argument("--budget-s", type=float, default=600.0)
    for command in (attention, train):
        add = command.add_argument
        add("--budget-s", type=float, default=math.inf, help="start nothing after that")
        # Training compiles and tunes kernels in its first iteration.
        timeout_s = 60.0 if command is attention else 240.0
        add("--timeout-s", type=float, default=timeout_s, help="for one answer of the ranks")
        add("--report", action="store_true", help="measure nothing")
    for command in (attention, train, everything):
        add = command.add_argument
        add("--nccl-library", metavar="FILE", help="loaded in place of the NCCL of torch")
        add("--connections", type=int, default=MEGATRON_CONNECTIONS, metavar="N",
            help="CUDA_DEVICE_MAX_CONNECTIONS (default: %(default)s)")  # fmt: skip
    return parser


def run_attention(args: argparse.Namespace) -> int:
    node = Node.here(args.nccl_library, args.connections)
    bench = AttentionBench(args.json, node, args.budget_s, args.timeout_s)
    groups = columns(args.schedules, args.comms, args.kernels, args.stock)
    if args.columns:
        groups = [[Column.parse(name) for name in args.columns]]
    if not args.report:
        shapes = cells(args.ranks, args.tokens, args.heads, args.head_dim)
        with Mps(any(node.shares_gpu(num_ranks) for num_ranks in args.ranks)):
            bench.run(shapes, groups, args.turns, args.trace, args.trace_columns)
    print(table(bench.results))
    if args.png is not None:
        plot(bench.results, args.png)
    statuses = (c["status"] for cell in bench.results["cells"] for c in cell["columns"].values())
    return int(WRONG in statuses)


def run_train(args: argparse.Namespace) -> int:
    node = Node.here(args.nccl_library, args.connections)
    if args.report:
        results = json.loads(args.json.read_text())
    else:
        with Mps(any(node.shares_gpu(num_ranks) for num_ranks in args.ranks)):
            results = bench_node_train.run(
                args.json,
                node,
                args.rows,
                args.ranks,
                args.tokens,
                shape=args.shape,
                options=dict(args.options),
                budget_s=args.budget_s,
                timeout_s=args.timeout_s,
            )
    print(bench_node_train.table(results))
    if args.png is not None:
        bench_node_train.plot(results, args.png)
    return int(any(case["status"] in ("failed", "wrong") for case in results["cases"]))


def run_all(args: argparse.Namespace) -> int:
    node = Node.here(args.nccl_library, args.connections)
    outcomes = bench_node_all.run(node, args.out, args.budget_s, args.parts)
    return int(any(outcome.is_bad for outcome in outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    commands = {"attention": run_attention, "train": run_train, "all": run_all}
    return commands[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
