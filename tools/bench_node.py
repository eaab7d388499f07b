#!/usr/bin/env python
"""Measure ours against stock on the GPUs of one machine, side by side in one run.

    python tools/bench_node.py attention                     # P = 4, 8, 2; 8k first
    python tools/bench_node.py attention --ranks 4 --tokens 8192 --heads 32/8 --budget-s 120
    python tools/bench_node.py attention --report --png out/node.png

With a GPU per rank each rank has its own. With one GPU the ranks share it through MPS, each with
its part of the multiprocessors, all at once: give --nccl-library a libnccl.so.2 of 2.30 or newer,
which several ranks per GPU need. Without a GPU it runs on CPU ranks in float32 to show that it
works; timings mean nothing there.

attention: causal, forward and forward + backward. Columns are SCHEDULE/COMM/KERNEL for ours,
te/TYPE for Transformer Engine's context parallelism and alone/KERNEL for the bound: one process
with the whole sequence on the whole GPU, by that kernel (on several GPUs divided by their number).
COMM "none" is the same plan on random buffers with nothing moved, KERNEL "none" the same transfers
with nothing computed. Each column is compared with torch's attention before it is timed. Every rank
runs with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron demands with context parallelism on Hopper.

Results go to --json after every cell, and a column that is there already is not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_node_attention import TURNS, AttentionBench
from bench_node_cells import SCHEDULES, STOCK, Column, cells, columns
from bench_node_report import plot, table
from bench_ranks import MEGATRON_CONNECTIONS, Mps, Node


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
    add("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    add("--comms", nargs="+", default=["nccl", "copy", "torch"])
    add("--kernels", nargs="+", default=["cudnn", "cuda", "auto"])
    add("--stock", nargs="*", default=STOCK, choices=STOCK)
    add("--columns", nargs="+", metavar="NAME", help="these, instead of all the combinations")
    add("--turns", type=int, default=TURNS)
    add("--trace", type=Path, metavar="DIR", help="write Chrome traces of the columns there")
    add("--trace-columns", nargs="+", metavar="NAME", help="only of these")
    add("--json", type=Path, default=Path("out/bench_node_attention.json"))
    add("--png", type=Path, help="write a plot (needs matplotlib)")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    attention = commands.add_parser("attention", help="attention alone")
    add_attention(attention)
    for command in (attention,):
        add = command.add_argument
        add("--budget-s", type=float, default=math.inf, help="start nothing after that")
        add("--timeout-s", type=float, default=60.0, help="for one answer of the ranks")
        add("--report", action="store_true", help="measure nothing")
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
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return {"attention": run_attention}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
