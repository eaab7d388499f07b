"""Megatron's command line on CPU ranks: defaults that work, and refusals of what cannot.

Defaults are set on the parser, so whatever the user gives explicitly wins; what the parsed
arguments ask for is checked before Megatron's own validation.
"""

from __future__ import annotations

import argparse
from typing import Any

# Parser destinations (not flags) and the value a CPU run needs. Kernels that only exist for CUDA
# are off; transformer_impl "local" is Megatron's own layers in plain torch.
CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "num_workers": 0,  # Worker processes would compete with the ranks for the cores.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
}

# (destination, values that are fine, the flag as the user knows it, what to do instead).
_REFUSALS: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    (
        "transformer_impl",
        ("local",),
        "--transformer-impl {value}",
        "Transformer Engine needs a GPU: leave the flag out or pass --transformer-impl local",
    ),
    (
        "distributed_backend",
        ("gloo",),
        "--distributed-backend {value}",
        "NCCL needs GPUs: leave the flag out or pass --distributed-backend gloo",
    ),
    ("fp8", (None,), "--fp8-format {value}", "train with --bf16 or in fp32"),
    ("fp4", (None,), "--fp4-format {value}", "train with --bf16 or in fp32"),
    ("cuda_graph_impl", ("none",), "--cuda-graph-impl {value}", "leave the flag out"),
    ("enable_cuda_graph", (False,), "--enable-cuda-graph", "leave the flag out"),
    ("external_cuda_graph", (False,), "--external-cuda-graph", "leave the flag out"),
    ("tp_comm_overlap", (False,), "--tp-comm-overlap", "leave the flag out"),
    ("te_rng_tracker", (False,), "--te-rng-tracker", "leave the flag out"),
    ("moe_grouped_gemm", (False,), "--moe-grouped-gemm", "leave the flag out"),
    ("use_megatron_fsdp", (False,), "--use-megatron-fsdp", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", (False,), "--use-torch-fsdp2", "use --use-distributed-optimizer"),
    ("inprocess_restart", (False,), "--inprocess-restart", "leave the flag out"),
    ("use_nccl_ub", (False,), "--use-nccl-ub", "leave the flag out"),
    ("use_sharp", (False,), "--use-sharp", "leave the flag out"),
    (
        "nccl_communicator_config_path",
        (None,),
        "--nccl-communicator-config-path",
        "leave the flag out",
    ),
    ("high_priority_stream_groups", (None, []), "--high-priority-stream-groups", "leave it out"),
    (
        "pipeline_model_parallel_comm_backend",
        (None,),
        "--pipeline-model-parallel-comm-backend {value}",
        "pipeline stages talk over gloo: leave the flag out",
    ),
    ("optimizer_cpu_offload", (False,), "--optimizer-cpu-offload", "leave the flag out"),
    ("cpu_offloading", (False,), "--cpu-offloading", "leave the flag out"),
    (
        "fine_grained_activation_offloading",
        (False,),
        "--fine-grained-activation-offloading",
        "leave the flag out",
    ),
    (
        "async_save",
        (False,),
        "--async-save",
        "the saved tensors would change while they are written: leave the flag out",
    ),
    ("log_straggler", (False,), "--log-straggler", "leave the flag out"),
)


def add_cpu_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Set ``CPU_DEFAULTS`` on a parser that holds Megatron's arguments; returns the parser."""
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{dest: v for dest, v in CPU_DEFAULTS.items() if dest in known})
    return parser


def check_cpu_args(args: argparse.Namespace) -> None:
    """Raise ValueError, in one sentence, for a setting that CPU ranks cannot run."""
    for dest, allowed, flag, instead in _REFUSALS:
        value = getattr(args, dest, allowed[0])
        if value not in allowed:
            _refuse(flag.format(value=value), instead)
    _check_attention_backend(args)
    _check_recompute_modules(args)
    if getattr(args, "profile", False) and not args.use_pytorch_profiler:
        _refuse("--profile", "it starts the CUDA profiler: add --use-pytorch-profiler")


def _refuse(flag: str, instead: str) -> None:
    raise ValueError(f"{flag} cannot run on CPU ranks (no GPU was found); {instead}.")


def _check_attention_backend(args: argparse.Namespace) -> None:
    """The attention kernels that ``--attention-backend`` can name all live in CUDA libraries."""
    backend = getattr(args, "attention_backend", None)
    name = getattr(backend, "name", backend)
    if name not in (None, "auto", "local", "unfused"):
        _refuse(f"--attention-backend {name}", "leave the flag out")


def _check_recompute_modules(args: argparse.Namespace) -> None:
    """These modules recompute through Transformer Engine's FP8 state, whatever the precision."""
    modules = set(getattr(args, "recompute_modules", None) or ())
    for module in sorted(modules & {"layernorm", "moe_act", "gdn_norm_out"}):
        _refuse(
            f"--recompute-modules {module}",
            "it needs Transformer Engine: recompute core_attn or mlp, or use "
            "--recompute-granularity full",
        )
