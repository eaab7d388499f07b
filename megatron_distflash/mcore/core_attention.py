"""Megatron's core-attention module, computed by DistFlashAttention.

Shapes: n tokens of this rank, b micro-batch, h query heads and g key-value heads of this
tensor-parallel rank, d head width.
"""

from __future__ import annotations

from typing import Any

from megatron.core.inference.utils import InferenceMode
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.mcore.remat import attend
from megatron_distflash.mcore.support import check_transformer_config

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class DistFlashCoreAttention(MegatronModule):
    """Self-attention over the context-parallel group. It has no parameters and no state.

    Use ``core_attention_class`` to get one with options; Megatron's specs take a class.

    Softmax is always computed in fp32 or better, so ``attention_softmax_in_fp32`` holds. So does
    ``apply_query_key_layer_scaling``, which divides the scores by the layer number and multiplies
    them back inside the softmax to keep 16-bit scores small: the scores here are never 16-bit.

    Raises:
        ValueError: the config or the arguments ask for something that is not supported.
    """

    options = DistFlashConfig()

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unsupported: Any,
    ) -> None:
        super().__init__(config=config)
        check_transformer_config(config, self.options)
        _check_layer(attention_type, attention_dropout, cp_comm_type, unsupported)
        _causal(attn_mask_type)  # Refuse now, not in the first iteration.
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.softmax_scale = softmax_scale
        self.group = None
        # A model can be built without context parallelism inside a job that has it.
        if config.context_parallel_size > 1:
            self.group = _context_parallel_group(pg_collection)
        self._register_load_state_dict_pre_hook(_drop_extra_state)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend over the whole sequence from this rank's tokens.

        Args:
            query: [n, b, h, d].
            key, value: [n, b, g, d].
            attention_mask: must be None; the mask kind says it all.

        Returns:
            [n, b, h·d].

        Raises:
            ValueError: an argument that is not supported.
        """
        _check_call(query, key, value, attention_mask, attention_bias, packed_seq_params)
        out = attend(
            query,
            key,
            _apart(value, query, key),
            caller=self,
            group=self.group,
            causal=_causal(self.attn_mask_type if attn_mask_type is None else attn_mask_type),
            softmax_scale=self.softmax_scale,
            schedule=self.options.schedule,
            kernel=self.options.kernel,
            comm=self.options.comm,
            timeout_s=self.options.timeout,
        )
        return out.reshape(*out.shape[:2], -1)


def core_attention_class(options: DistFlashConfig) -> type[DistFlashCoreAttention]:
    """The module class with these options, to be put into a layer spec."""
    return type("DistFlashCoreAttention", (DistFlashCoreAttention,), {"options": options})


def _check_layer(
    attention_type: str,
    attention_dropout: float | None,
    cp_comm_type: str | None,
    unsupported: dict[str, Any],
) -> None:
    """Refuse constructor arguments that do not come from the config."""
    if attention_type != "self":
        raise ValueError(
            f"{attention_type} attention is not supported with --distflash-attn: only "
            "self-attention has its queries and keys split alike."
        )
    if attention_dropout:
        raise ValueError(
            f"Attention dropout ({attention_dropout}) is not supported with --distflash-attn: "
            "set it to 0."
        )
    if cp_comm_type not in (None, "p2p"):
        raise ValueError(
            f"cp_comm_type {cp_comm_type} chooses how stock attention communicates, which "
            "--distflash-attn replaces: leave it out."
        )
    given = sorted(name for name, value in unsupported.items() if value is not None)
    if given:
        raise ValueError(f"{', '.join(given)} is not supported with --distflash-attn.")


def _causal(attn_mask_type: AttnMaskType) -> bool:
    if attn_mask_type not in _CAUSAL:
        raise ValueError(
            f"Attention mask type {attn_mask_type.name} is not supported with --distflash-attn: "
            "use causal or no_mask."
        )
    return _CAUSAL[attn_mask_type]


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> None:
    if packed_seq_params is not None:
        raise ValueError(
            "Packed sequences are not supported with --distflash-attn: train on unpacked ones."
        )
    if attention_bias is not None:
        raise ValueError("An attention bias is not supported with --distflash-attn.")
    if attention_mask is not None:
        raise ValueError(
            "--distflash-attn masks by position and takes no mask tensor: pass "
            "attention_mask=None (--no-create-attention-mask-in-dataloader)."
        )
    if InferenceMode.is_active() or query.shape[0] != key.shape[0]:
        raise ValueError(
            "Inference with a key-value cache is not supported with --distflash-attn: run it "
            "without the flag."
        )
    if query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"Values of width {value.shape[-1]} with keys of width {query.shape[-1]} are not "
            "supported with --distflash-attn."
        )


def _apart(value: Tensor, *others: Tensor) -> Tensor:
    """The values, to be saved for the backward, in memory of their own.

    They come as a view of the projection's output, which holds queries and keys from before the
    rotary embedding too: saving the view would keep all of it. Where the others are views of the
    same memory, it is saved anyway.
    """
    memory = value.untyped_storage()
    shared = any(x.untyped_storage().data_ptr() == memory.data_ptr() for x in others)
    alone = memory.nbytes() == value.numel() * value.itemsize
    return value if shared or alone or not value.requires_grad else value.clone()


def _context_parallel_group(pg_collection: ProcessGroupCollection | None) -> Any:
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
    return pg_collection.cp


def _drop_extra_state(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Transformer Engine's attention saves its fp8 statistics, which mean nothing here."""
    state_dict.pop(f"{prefix}_extra_state", None)
