"""What ``--distflash-attn`` does not support, each with one sentence: what is wrong, what to do.

The rules read parsed arguments and a TransformerConfig alike, since Megatron names the same thing
the same in both; what one of them lacks counts as not set. Nothing here imports Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_distflash.config import DistFlashConfig, OptionError
from megatron_distflash.runtime import native
from megatron_distflash.runtime.cuda_tasks import HEAD_DIMS


@dataclass(frozen=True, slots=True)
class Rule:
    """One setting that is refused.

    Attributes:
        name: the attribute of arguments or config.
        refused: whether a value of it is refused.
        message: the sentence; ``{value}`` stands for the offending value.
    """

    name: str
    refused: Callable[[Any], bool]
    message: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _is_not(*allowed: Any) -> Callable[[Any], bool]:
    """Refuse every value (enumerations by name) but these."""
    return lambda value: getattr(value, "name", value) not in allowed


def _has_other_than_p2p(value: Any) -> bool:
    kinds = value if isinstance(value, list | tuple) else [value]
    return any(kind not in (None, "p2p") for kind in kinds)


_PACKED = "packed documents are not supported with --distflash-attn: leave it out."
_ORDER = "is not supported with --distflash-attn: use a GPT with standard attention layers."

RULES: tuple[Rule, ...] = (
    # How context parallelism is done.
    Rule(
        "cp_comm_type",
        _has_other_than_p2p,
        "--cp-comm-type {value} chooses how Transformer Engine's attention communicates, which "
        "--distflash-attn replaces: leave it out and choose with --distflash-schedule.",
    ),
    Rule(
        "hierarchical_context_parallel_sizes",
        _is_set,
        "--hierarchical-context-parallel-sizes is not supported with --distflash-attn: leave it "
        "out, --context-parallel-size is enough.",
    ),
    Rule(
        "hybrid_context_parallel",
        _is_set,
        "--hybrid-context-parallel changes the group from batch to batch, which --distflash-attn "
        "does not support: leave it out.",
    ),
    # What attention computes.
    Rule(
        "attention_dropout",
        _is_set,
        "Attention dropout ({value}) is not supported with --distflash-attn: pass "
        "--attention-dropout 0.",
    ),
    Rule(
        "window_size",
        _is_set,
        "Sliding-window attention (--window-size {value}) is not supported with "
        "--distflash-attn yet: leave it out.",
    ),
    Rule(
        "softmax_type",
        _is_not(None, "vanilla"),
        "Attention sinks (--softmax-type {value}) are not supported with --distflash-attn: use "
        "--softmax-type vanilla.",
    ),
    Rule(
        "multi_latent_attention",
        _is_set,
        "Multi-latent attention has values narrower than keys, which --distflash-attn does not "
        "support yet: leave --multi-latent-attention out.",
    ),
    Rule(
        "position_embedding_type",
        _is_not(None, "learned_absolute", "rope", "yarn", "mrope", "none"),
        "--position-embedding-type {value} adds a bias to the attention scores, which "
        "--distflash-attn does not support: use rope.",
    ),
    Rule(
        "qk_clip",
        _is_set,
        "--qk-clip needs the largest attention score of every head, which --distflash-attn does "
        "not return: leave it out.",
    ),
    Rule(
        "log_max_attention_logit",
        _is_set,
        "--log-max-attention-logit needs the largest attention score of every head, which "
        "--distflash-attn does not return: leave it out.",
    ),
    Rule(
        "fp8_dot_product_attention",
        _is_set,
        "Attention in fp8 is not supported with --distflash-attn: turn fp8_dot_product_attention "
        "off (fp8 linear layers are fine).",
    ),
    Rule(
        "fp8_multi_head_attention",
        _is_set,
        "Attention in fp8 is not supported with --distflash-attn: turn fp8_multi_head_attention "
        "off (fp8 linear layers are fine).",
    ),
    Rule(
        "batch_invariant_mode",
        _is_set,
        "--batch-invariant-mode needs its own attention kernels, which --distflash-attn replaces: "
        "leave it out.",
    ),
    # Packed documents.
    Rule("reset_attention_mask", _is_set, f"--reset-attention-mask: {_PACKED}"),
    Rule(
        "dataloader_inter_document_masking",
        _is_set,
        f"--dataloader-inter-document-masking: {_PACKED}",
    ),
    Rule("sft", _is_set, f"--sft: {_PACKED}"),
    # Whose attention it is.
    Rule(
        "attention_backend",
        _is_not(None, "auto"),
        "--attention-backend {value} chooses among stock attention kernels, which "
        "--distflash-attn replaces: leave it out and choose with --distflash-kernel.",
    ),
    Rule(
        "use_flash_attn",
        _is_set,
        "--use-flash-attn chooses a stock attention kernel, which --distflash-attn replaces: "
        "leave it out.",
    ),
    Rule(
        "use_kitchen_attention",
        _is_set,
        "--use-kitchen-attention brings its own attention: leave it or --distflash-attn out.",
    ),
    Rule(
        "use_kitchen",
        _is_set,
        "--use-kitchen builds layers that --distflash-attn does not know: leave one of them out.",
    ),
    Rule(
        "transformer_impl",
        _is_not(None, "local", "transformer_engine"),
        "--transformer-impl {value} is not supported with --distflash-attn: use local or "
        "transformer_engine.",
    ),
    # Models whose other layers depend on the order of tokens, or that build their own attention.
    Rule("hybrid_layer_pattern", _is_set, f"--hybrid-layer-pattern {_ORDER}"),
    Rule("hybrid_override_pattern", _is_set, f"--hybrid-override-pattern {_ORDER}"),
    Rule("is_hybrid_model", _is_set, f"A hybrid (state-space) model {_ORDER}"),
    Rule(
        "experimental_attention_variant",
        _is_set,
        f"--experimental-attention-variant {{value}} {_ORDER}",
    ),
    Rule(
        "heterogeneous_layers_config_path",
        _is_set,
        f"--heterogeneous-layers-config-path {_ORDER}",
    ),
    Rule(
        "heterogeneous_layers_config_encoded_json",
        _is_set,
        f"--heterogeneous-layers-config-encoded-json {_ORDER}",
    ),
    Rule(
        "mtp_hsm",
        _is_set,
        "--mtp-hsm moves hidden states between neighbouring tokens, which --distflash-attn does "
        "not support: leave it out.",
    ),
    # How training runs.
    Rule(
        "cuda_graph_impl",
        _is_not(None, "none"),
        "--cuda-graph-impl {value} would capture attention's communication, which "
        "--distflash-attn does not support: use --cuda-graph-impl none.",
    ),
    Rule(
        "enable_cuda_graph",
        _is_set,
        "--enable-cuda-graph would capture attention's communication, which --distflash-attn does "
        "not support: leave it out.",
    ),
    Rule(
        "external_cuda_graph",
        _is_set,
        "--external-cuda-graph would capture attention's communication, which --distflash-attn "
        "does not support: leave it out.",
    ),
    Rule(
        "offload_modules",
        lambda value: "core_attn" in (value or ()),
        "--offload-modules core_attn frees tensors that --distflash-attn still needs: leave "
        "core_attn out of it.",
    ),
    Rule(
        "flash_decode",
        _is_set,
        "--flash-decode is for inference, which --distflash-attn does not do: leave one of them "
        "out.",
    ),
    Rule(
        "perform_rl_step",
        _is_set,
        "--perform-rl-step generates text while it trains, which --distflash-attn does not do: "
        "leave one of them out.",
    ),
)


def problems(settings: Any) -> list[str]:
    """One sentence for every refused setting of parsed arguments or a TransformerConfig."""
    found = []
    for rule in RULES:
        value = getattr(settings, rule.name, None)
        if value is not None and rule.refused(value):
            found.append(rule.message.format(value=_as_typed(value)))
    return found


def check_arguments(args: Any, options: DistFlashConfig) -> None:
    """Refuse a command line that cannot run, before anything is built.

    Raises:
        OptionError: one sentence per problem, each on its line.
    """
    found = _model_problems(args, options)
    _raise(found + _device_problems(args, options) + _length_problems(args, options))


def check_transformer_config(config: Any, options: DistFlashConfig) -> None:
    """Refuse a model config that cannot run; for those who build models without arguments.

    Raises:
        OptionError: one sentence per problem, each on its line.
    """
    found = _model_problems(config, options)
    deterministic = getattr(config, "deterministic_mode", False)
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        found.append(
            "deterministic_mode by itself does not make attention deterministic: call "
            "torch.use_deterministic_algorithms(True), too, as --deterministic-mode does."
        )
    _raise(found)


def _model_problems(settings: Any, options: DistFlashConfig) -> list[str]:
    """What arguments and a TransformerConfig can both get wrong."""
    found = problems(settings) + _recompute_problems(settings, options)
    return found + _determinism_problems(settings, options)


def _raise(found: list[str]) -> None:
    if found:
        raise OptionError("\n".join(found))


def _recompute_problems(settings: Any, options: DistFlashConfig) -> list[str]:
    """What goes against keeping attention's outputs through recomputation."""
    granularity = getattr(settings, "recompute_granularity", None)
    modules = getattr(settings, "recompute_modules", None)
    if options.offload and granularity != "full":
        return [
            "--distflash-offload holds the outputs that are kept through full recomputation: add "
            "--recompute-granularity full or leave it out."
        ]
    # Megatron's default for the modules is core_attn alone.
    if options.remat and granularity == "selective" and (modules is None or "core_attn" in modules):
        return [
            "--recompute-granularity selective recomputes core_attn unless told otherwise, which "
            "would run again what --distflash-attn keeps: name other --recompute-modules, use "
            "--recompute-granularity full, or pass --no-distflash-remat."
        ]
    return []


def _determinism_problems(settings: Any, options: DistFlashConfig) -> list[str]:
    """Deterministic mode is a promise that the kernels must keep."""
    if getattr(settings, "deterministic_mode", False) and options.kernel == "cudnn":
        return [
            "--distflash-kernel cudnn does not promise equal gradients in every run, which "
            "--deterministic-mode asks for: leave it out."
        ]
    return []


def _device_problems(args: Any, options: DistFlashConfig) -> list[str]:
    """What this machine cannot do: better told now than by the first attention."""
    return _kernel_problems(args, options) + _comm_problems(options)


def _kernel_problems(args: Any, options: DistFlashConfig) -> list[str]:
    kernel = options.kernel
    if not torch.cuda.is_available():
        if kernel in ("auto", "cpu"):
            return []
        return [f"--distflash-kernel {kernel} needs a GPU, and there is none: leave it out."]
    found = []
    if kernel == "cpu":
        found.append("--distflash-kernel cpu takes no GPU tensors: leave it out on a GPU.")
    if not (args.bf16 or args.fp16):
        found.append("--distflash-attn computes in bf16 or fp16 on a GPU: add --bf16.")
    head_dim, largest = _head_dim(args), 128 if kernel in ("cudnn", "fa4") else 256
    fits, advice = range(8, largest + 1, 8), f"a multiple of 8 up to {largest}"
    if kernel == "cuda":
        fits, advice = HEAD_DIMS, f"one of {', '.join(map(str, HEAD_DIMS))}"
    if head_dim is not None and head_dim not in fits:
        found.append(
            f"A head dim of {head_dim} is not supported by --distflash-attn with kernel {kernel}: "
            f"choose --kv-channels as {advice}."
        )
    return found


def _head_dim(args: Any) -> int | None:
    """None while a checkpoint is still to say it."""
    if args.kv_channels is not None:
        return args.kv_channels
    if args.hidden_size is None or args.num_attention_heads is None:
        return None
    return args.hidden_size // args.num_attention_heads


def _comm_problems(options: DistFlashConfig) -> list[str]:
    if options.comm not in ("nccl", "copy"):
        return []
    if not torch.cuda.is_available():
        return [
            f"--distflash-comm {options.comm} moves GPU memory, and there is no GPU: use torch."
        ]
    try:
        has_gpu_transports = native.module().with_cuda
    except RuntimeError as error:
        return [str(error)]
    if has_gpu_transports:
        return []
    return [
        f"--distflash-comm {options.comm} needs the native module built with cuda.h and nccl.h: "
        "build it again where they are found, or use torch."
    ]


def _length_problems(args: Any, options: DistFlashConfig) -> list[str]:
    """Whether the sequence can be cut: pipeline stages exchange tensors of one size, and sequence
    parallelism cuts a rank's chunk once more."""
    length, size = args.seq_length, args.context_parallel_size
    if length is None:
        return []
    split = args.tensor_model_parallel_size if args.sequence_parallel else 1
    chunks = size if options.contiguous or size == 1 else 2 * size
    if length % chunks:
        what = "" if options.contiguous else "2 * "
        return [
            f"--seq-length {length} must be a multiple of {chunks}, {what}the context parallel "
            f"size, with --distflash-schedule {options.schedule}."
        ]
    if length % (size * split):
        return [
            f"--seq-length {length} must be a multiple of {size * split}, the context times the "
            "tensor parallel size, with --sequence-parallel."
        ]
    return []


def _as_typed(value: Any) -> str:
    """A value as it was typed on the command line."""
    value = getattr(value, "name", value)
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
