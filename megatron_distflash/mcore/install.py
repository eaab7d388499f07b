"""Putting DistFlashAttention into Megatron, and taking it out again.

Installing changes Megatron in this process: the backends hand out our core attention, and the
places that know how a sequence is split know our layout. Do it before a model is built; best
before the training script is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.mcore import layout, loss, remat
from megatron_distflash.mcore.patching import Patches


@dataclass(frozen=True, slots=True)
class _Installation:
    options: DistFlashConfig
    patches: Patches


# What is installed in this process. There is one Megatron to patch, so there is one of these.
_installation: _Installation | None = None


def installed() -> DistFlashConfig | None:
    """The options in force, or None where Megatron is as it was."""
    return None if _installation is None else _installation.options


def install(options: DistFlashConfig) -> None:
    """Make Megatron in this process use DistFlashAttention. Again with equal options: nothing.

    Raises:
        ValueError: other options are installed already.
    """
    global _installation
    if installed() == options:
        return
    if _installation is not None:
        raise ValueError(
            f"{installed()} is installed already and {options} is asked for: uninstall() first."
        )
    patches = Patches()
    try:
        _patch_core_attention(patches, options)
        _patch_loss(patches, options)
        remat.keep_outputs(patches, options)
        if options.contiguous:
            _patch_layout(patches)
    except BaseException:
        patches.undo()
        raise
    _installation = _Installation(options, patches)


def uninstall() -> None:
    """Give Megatron back as it was. Without an installation: nothing."""
    global _installation
    if _installation is not None:
        _installation.patches.undo()
        _installation = None


def _patch_core_attention(patches: Patches, options: DistFlashConfig) -> None:
    """Both backends' providers serve every GPT spec, of MoE and multi-token-prediction layers too.

    Specs that name a stock core attention themselves would silently compute on the wrong token
    order, so building one is an error.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_distflash.mcore.core_attention import core_attention_class

    attention = core_attention_class(options)

    def core_attention(self: Any) -> type:
        return attention

    patches.set(LocalSpecProvider, "core_attention", core_attention)
    patches.set(DotProductAttention, "__init__", _refuse_stock_attention)
    if transformer_engine.HAVE_TE:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        patches.set(TESpecProvider, "core_attention", core_attention)
        patches.set(transformer_engine.TEDotProductAttention, "__init__", _refuse_stock_attention)


def _refuse_stock_attention(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"This model's layer spec asks for {type(self).__name__} by name, which --distflash-attn "
        "cannot replace: use a spec that takes its core attention from the backend, as Megatron's "
        "GPT specs do."
    )


def _patch_loss(patches: Patches, options: DistFlashConfig) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import multi_token_prediction as mtp

    roll = layout.roll_left if options.contiguous else None
    _wrap(patches, schedules.forward_step_calc_loss, loss.exact_calc_loss)
    _wrap(patches, mtp.process_mtp_loss, loss.exact_mtp_loss)
    _wrap(patches, mtp.roll_tensor, lambda stock: loss.exact_roll(stock, roll))


def _patch_layout(patches: Patches) -> None:
    from megatron.core import utils
    from megatron.core.models.common.embeddings import (  # noqa: F401  (importers by name)
        rope_utils,
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )
    from megatron.core.ssm import mamba_context_parallel as mamba

    patches.replace(utils.get_batch_on_this_cp_rank, layout.batch_on_this_cp_rank)
    patches.replace(rope_utils.get_pos_emb_on_this_cp_rank, layout.pos_emb_on_this_cp_rank)
    patches.replace(mamba._undo_attention_load_balancing, _refuse_state_space)
    patches.replace(mamba._redo_attention_load_balancing, _refuse_state_space)


def _refuse_state_space(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "State-space and linear-attention layers are not supported with --distflash-attn: use a "
        "GPT with standard attention layers, or --distflash-schedule zigzag."
    )


def _wrap(patches: Patches, stock: FunctionType, wrapper: Any) -> None:
    patches.replace(stock, wrapper(stock))
