"""``--distflash-schedule auto``, settled before anything is installed: the layout of the tokens,
and with it half of the patches, hangs on the schedule."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from megatron_distflash.config import DistFlashConfig, OptionError
from megatron_distflash.plan import Mask
from megatron_distflash.plan.choice import (
    ANY_LAYOUT,
    CONTIGUOUS,
    choose_schedule,
    chunk_time_of,
)

# Nominal figures of a Hopper node, per GPU: attention in 16 bits, NVLink one way, one 400 Gbit/s
# network port. Only their ratio matters, and that only where transfers may not hide.
ATTENTION_FLOPS = 600e12
NODE_BYTES_S = 400e9
NETWORK_BYTES_S = 50e9

# How launchers say how many ranks a node has: torchrun, Open MPI, Slurm.
_PER_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")

_log = logging.getLogger(__name__)


def settle_on_command_line(argv: list[str], options: DistFlashConfig) -> DistFlashConfig:
    """``settle_schedule`` before Megatron has parsed its arguments; flags of others are ignored.

    Raises:
        OptionError: as ``settle_schedule``.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--context-parallel-size", "--tensor-model-parallel-size", "--num-query-groups"):
        parser.add_argument(flag, type=int, default=1)  # Megatron's defaults
    for flag in ("--seq-length", "--num-attention-heads"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--group-query-attention", action="store_true")
    args, _ = parser.parse_known_args(argv)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return settle_schedule(args, options)


def settle_schedule(args: Namespace, options: DistFlashConfig) -> DistFlashConfig:
    """The options with ``auto`` replaced by the schedule that suits these arguments.

    Raises:
        OptionError: the arguments do not say yet what the model looks like.
    """
    if options.schedule != "auto":
        return options
    size, length, num_heads = args.context_parallel_size, args.seq_length, args.num_attention_heads
    if length is None or num_heads is None:
        raise OptionError(
            "--distflash-schedule auto needs --seq-length and --num-attention-heads on the command "
            "line; pass them, or name a schedule."
        )
    tensor_parallel = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else num_heads
    spans_nodes = size * tensor_parallel > _ranks_per_node(args.world_size)
    num_tokens = max(1, length // size)
    schedule = choose_schedule(
        (num_tokens,) * size,
        num_heads=max(1, num_heads // tensor_parallel),
        num_kv_heads=max(1, groups // tensor_parallel),
        mask=Mask.causal(),
        chunk_time=chunk_time_of(
            num_tokens,
            link_bytes_s=NETWORK_BYTES_S if spans_nodes else NODE_BYTES_S,
            flops=ATTENTION_FLOPS,
        ),
        among=CONTIGUOUS if length % (2 * size) else ANY_LAYOUT,
    )
    return replace(options, schedule=schedule)


def _ranks_per_node(world_size: int) -> int:
    """As the launcher says; else all are taken to be in one node, which the first rank says."""
    for name in _PER_NODE:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if world_size > 1 and os.environ.get("RANK", "0") == "0":
        _log.warning(
            "distflash: --distflash-schedule auto takes all %d ranks to be in one node, since none "
            "of %s is set; set the first to the number of ranks in a node if there are several.",
            world_size,
            ", ".join(_PER_NODE),
        )
    return world_size
