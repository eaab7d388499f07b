"""Putting DistFlashAttention into Megatron and taking it out; the parts that are put in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.mcore.harness import RankPool, model_parallel

WORLD = 3
CHUNK = 4  # Tokens of one rank.


@pytest.fixture
def random_seed() -> int:
    """Fresh every time; pytest shows it when the test fails."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return seed


@contextlib.contextmanager
def installation(**options: Any) -> Iterator[None]:
    from megatron_distflash.config import DistFlashConfig
    from megatron_distflash.mcore.install import install, uninstall

    install(DistFlashConfig(**options))
    try:
        yield
    finally:
        uninstall()


def places() -> dict[str, Any]:
    """Every function and class attribute of Megatron that installing may change, as it is now."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if callable(value):
                    found[f"{module_name}.{name}"] = value
                if isinstance(value, type) and value.__module__.startswith("megatron."):
                    found |= {
                        f"{module_name}.{name}.{key}": attribute
                        for key, attribute in list(vars(value).items())
                        if callable(attribute)
                    }
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before if after.get(name) is not before[name]}


def reversible_case(rank: int, world: int) -> None:
    from megatron_distflash.config import DistFlashConfig
    from megatron_distflash.mcore.install import installed, uninstall

    with installation():  # Loads what it patches.
        pass
    before = places()
    with installation(schedule="ring"):
        assert installed() == DistFlashConfig(schedule="ring")
        during = changed(before, places())
    assert {
        "megatron.core.utils.get_batch_on_this_cp_rank",
        "megatron.training.training.get_batch_on_this_cp_rank",
        "megatron.core.models.common.embeddings.rope_utils.get_pos_emb_on_this_cp_rank",
        "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank",
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding."
        "get_pos_emb_on_this_cp_rank",
        "megatron.core.models.backends.LocalSpecProvider.core_attention",
        "megatron.core.models.gpt.gpt_model.process_mtp_loss",
        "megatron.core.transformer.multi_token_prediction.roll_tensor",
        "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",
    } <= during
    assert changed(before, places()) == set()
    assert installed() is None
    uninstall()  # Nothing left to do.

    with installation(schedule="zigzag"):  # The layout stays Megatron's.
        zigzag = changed(before, places())
    assert "megatron.core.models.backends.LocalSpecProvider.core_attention" in zigzag
    assert not any("cp_rank" in name for name in zigzag)


def test_installing_is_complete_and_reversible(rank_pool: RankPool) -> None:
    rank_pool.run(reversible_case, world=1)


def idempotent_case(rank: int, world: int) -> None:
    from megatron_distflash.config import DistFlashConfig
    from megatron_distflash.mcore.install import install, installed

    with installation(schedule="paper"):
        once = places()
        install(DistFlashConfig(schedule="paper"))
        assert changed(once, places()) == set()
        with pytest.raises(ValueError, match="installed already.*uninstall"):
            install(DistFlashConfig())
        assert installed() == DistFlashConfig(schedule="paper")


def test_installing_twice(rank_pool: RankPool) -> None:
    rank_pool.run(idempotent_case, world=1)


def by_name_case(rank: int, world: int) -> None:
    from megatron.core import utils

    stock = utils.get_batch_on_this_cp_rank
    script = ModuleType("script_that_imports_by_name")
    script.slice_batch = stock  # from … import get_batch_on_this_cp_rank as slice_batch
    sys.modules[script.__name__] = script
    try:
        with installation():
            assert script.slice_batch is utils.get_batch_on_this_cp_rank is not stock
            late = ModuleType("script_that_is_imported_later")
            late.get_batch_on_this_cp_rank = utils.get_batch_on_this_cp_rank
            sys.modules[late.__name__] = late
        assert script.slice_batch is late.get_batch_on_this_cp_rank is stock
    finally:
        sys.modules.pop("script_that_imports_by_name", None)
        sys.modules.pop("script_that_is_imported_later", None)


def test_importers_by_name_are_reached(rank_pool: RankPool) -> None:
    rank_pool.run(by_name_case, world=1)


# ---- the contiguous layout


def layout_case(rank: int, world: int, seed: int) -> None:
    from megatron_distflash.mcore import layout

    group = torch.distributed.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, (2, world * CHUNK), generator=generator)
    mine = slice(rank * CHUNK, (rank + 1) * CHUNK)

    batch = {"tokens": tokens, "labels": None, "max_seqlen": torch.ones(5), "cu_seqlens": None}
    batch["attention_mask"] = tokens[:, None, :, None] < tokens[:, None, None, :]
    rows = batch["attention_mask"][:, :, mine]
    cut = layout.batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    assert torch.equal(cut["tokens"], tokens[:, mine])
    assert torch.equal(cut["attention_mask"], rows)
    assert cut["labels"] is None and len(cut["max_seqlen"]) == 5

    table = torch.randn(world * CHUNK, 1, 1, 6, generator=generator)
    assert torch.equal(layout.pos_emb_on_this_cp_rank(table, 0, group), table[mine])
    with pytest.raises(ValueError, match="multiple of the context parallel size"):
        layout.pos_emb_on_this_cp_rank(table[1:], 0, group)


def test_every_rank_gets_its_chunk(rank_pool: RankPool, random_seed: int) -> None:
    rank_pool.run(layout_case, random_seed, world=WORLD)


def refused_batch_case(rank: int, world: int) -> None:
    from megatron_distflash.mcore import layout

    tokens, group = torch.arange(8)[None], torch.distributed.group.WORLD
    with pytest.raises(ValueError, match="Hybrid context parallelism"):
        layout.batch_on_this_cp_rank({"tokens": tokens}, is_hybrid_cp=True, cp_group=group)
    with pytest.raises(ValueError, match="packed documents"):
        batch = {"tokens": tokens, "cu_seqlens": torch.tensor([[0, 3, 8]])}
        layout.batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def test_batches_that_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(refused_batch_case, world=2)


def roll_case(rank: int, world: int, seed: int) -> None:
    from megatron.core.transformer import multi_token_prediction as mtp

    group = torch.distributed.group.WORLD
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(1, 1000, (2, world * CHUNK), generator=generator)
    mine = slice(rank * CHUNK, (rank + 1) * CHUNK)
    once, _ = mtp.roll_tensor(whole, shifts=-1, dims=-1, cp_group=None)
    twice, _ = mtp.roll_tensor(once, shifts=-1, dims=-1, cp_group=None)
    with installation():
        rolled, total = mtp.roll_tensor(whole[:, mine], shifts=-1, dims=-1, cp_group=group)
        assert torch.equal(rolled, once[:, mine]) and total == once[:, mine].sum()
        rolled, _ = mtp.roll_tensor(rolled, shifts=-1, dims=-1, cp_group=group)
        assert torch.equal(rolled, twice[:, mine])
        columns, _ = mtp.roll_tensor(whole[:, mine].T, shifts=-1, dims=0, cp_group=group)
        assert torch.equal(columns, once[:, mine].T)
        with pytest.raises(ValueError, match="packed sequences"):
            mtp.roll_tensor(whole, cp_group=group, packed_seq_params=SimpleNamespace())
        with pytest.raises(ValueError, match="one place to the left, got 1"):
            mtp.roll_tensor(whole, shifts=1, cp_group=group)


def test_rolling_crosses_ranks(rank_pool: RankPool, random_seed: int) -> None:
    rank_pool.run(roll_case, random_seed, world=WORLD)


# ---- the core-attention module


def tiny_config(**settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    defaults |= {"attention_dropout": 0.0, "use_cpu_initialization": True}
    return TransformerConfig(**(defaults | settings))


def build(attention_class: type, config: Any, **arguments: Any) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType

    defaults = {"layer_number": 2, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    defaults["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    return attention_class(config=config, **(defaults | arguments))


def qkv(seed: int, kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 2, heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads)]


def same_as_stock_case(rank: int, world: int, seed: int, settings: dict[str, Any]) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    settings = dict(settings)
    arguments = {"softmax_scale": settings.pop("softmax_scale", None)}
    if settings.pop("bidirectional", False):
        arguments["attn_mask_type"] = AttnMaskType.no_mask
    config = tiny_config(masked_softmax_fusion=False, **settings)
    q, k, v = qkv(seed, config.num_query_groups)
    with model_parallel():
        stock = build(DotProductAttention, config, **arguments)
        ours = build(DistFlashCoreAttention, config, **arguments)
        expected, out = (attention(q, k, v, None) for attention in (stock, ours))
        assert list(ours.state_dict()) == []
    assert out.shape == (6, 2, 32)
    # fp32: sums of 6 products in another order.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_query_groups": 2},
        {"bidirectional": True},
        {"softmax_scale": 0.7},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
    ],
    ids=str,
)
def test_core_attention_is_stock_on_one_rank(
    rank_pool: RankPool, random_seed: int, settings: dict[str, Any]
) -> None:
    rank_pool.run(same_as_stock_case, random_seed, settings, world=1)


def refused_layer_case(rank: int, world: int, settings: dict, arguments: dict, match: str) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    if "attn_mask_type" in arguments:
        arguments = {"attn_mask_type": AttnMaskType[arguments["attn_mask_type"]]}
    config = tiny_config()
    for name, value in settings.items():  # Past the checks of the config's own constructor.
        setattr(config, name, value)
    with model_parallel(), pytest.raises(ValueError, match=match):
        build(DistFlashCoreAttention, config, **arguments)


@pytest.mark.parametrize(
    ("settings", "arguments", "match"),
    [
        ({}, {"attention_type": "cross"}, "cross attention is not supported"),
        ({}, {"attn_mask_type": "padding"}, "mask type padding is not supported"),
        ({}, {"attn_mask_type": "arbitrary"}, "mask type arbitrary is not supported"),
        ({}, {"attention_dropout": 0.1}, "dropout .0.1. is not supported.*set it to 0"),
        ({}, {"cp_comm_type": "a2a"}, "cp_comm_type a2a"),
        ({}, {"k_channels": 24, "v_channels": 16}, "k_channels, v_channels"),
        ({"attention_dropout": 0.1}, {}, "--attention-dropout 0"),
        ({"window_size": (128, 0)}, {}, "--window-size 128 0"),
        ({"softmax_type": "learnable"}, {}, "--softmax-type learnable"),
        ({"fp8_dot_product_attention": True}, {}, "fp8_dot_product_attention off"),
        ({"fp8_multi_head_attention": True}, {}, "fp8_multi_head_attention off"),
        ({"hybrid_context_parallel": True}, {}, "--hybrid-context-parallel"),
        ({"multi_latent_attention": True}, {}, "Multi-latent attention"),
    ],
    ids=str,
)
def test_layers_that_are_refused(
    rank_pool: RankPool, settings: dict[str, Any], arguments: dict[str, Any], match: str
) -> None:
    rank_pool.run(refused_layer_case, settings, arguments, match, world=1)


def refused_call_case(rank: int, world: int, seed: int) -> None:
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    q, k, v = qkv(seed)
    with model_parallel():
        attention = build(DistFlashCoreAttention, tiny_config())
    refusals: list[tuple[str, Callable[[], Any]]] = [
        ("Packed sequences", lambda: attention(q, k, v, None, packed_seq_params=object())),
        ("attention bias", lambda: attention(q, k, v, None, attention_bias=q)),
        ("no mask tensor", lambda: attention(q, k, v, torch.ones(1, 1, 6, 6).bool())),
        ("key-value cache", lambda: attention(q[-1:], k, v, None)),
        ("width 5 with keys of width 8", lambda: attention(q, k, v[..., :5], None)),
        ("padding", lambda: attention(q, k, v, None, attn_mask_type=AttnMaskType.padding)),
    ]
    for match, call in refusals:
        with pytest.raises(ValueError, match=match):
            call()
    with InferenceMode.active(), pytest.raises(ValueError, match="Inference"):
        attention(q, k, v, None)


def test_calls_that_are_refused(rank_pool: RankPool, random_seed: int) -> None:
    rank_pool.run(refused_call_case, random_seed, world=1)


def extra_state_case(rank: int, world: int) -> None:
    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    with model_parallel():
        layer = torch.nn.Sequential(build(DistFlashCoreAttention, tiny_config()))
    layer.load_state_dict({"0._extra_state": torch.zeros(3)})
    with pytest.raises(RuntimeError, match="0.weight"):
        layer.load_state_dict({"0.weight": torch.zeros(3)})


def test_transformer_engines_extra_state_is_dropped(rank_pool: RankPool) -> None:
    rank_pool.run(extra_state_case, world=1)


def saved_values_case(rank: int, world: int, seed: int) -> None:
    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    generator = torch.Generator().manual_seed(seed)
    with model_parallel():
        attention = build(DistFlashCoreAttention, tiny_config())
    results = []
    for rotated in (True, False):
        projected = torch.randn(6, 2, 4, 24, generator=generator, requires_grad=True)
        q, k, v = projected.clone().split(8, dim=-1)
        before_rotation = v.untyped_storage().data_ptr()
        if rotated:
            q, k = q * 0.5, k * 2.0
        saved = set()
        remember = torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.add(x.untyped_storage().data_ptr()) or x, lambda x: x
        )
        with remember:
            out = attention(q, k, v, None)
        results.append(before_rotation in saved)
        dout = torch.randn(out.shape, generator=generator)
        (grad,) = torch.autograd.grad(out, projected, dout)
        own = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        grads = list(torch.autograd.grad(attention(*own, None), own, dout))
        if rotated:
            grads = [grads[0] * 0.5, grads[1] * 2.0, grads[2]]
        torch.testing.assert_close(grad, torch.cat(grads, dim=-1), rtol=0, atol=0)
    # Unrotated queries and keys are saved as they are: then a copy of the values frees nothing.
    assert results == [False, True]


def test_saved_values_do_not_keep_the_projection(rank_pool: RankPool, random_seed: int) -> None:
    rank_pool.run(saved_values_case, random_seed, world=1)


def providers_case(rank: int, world: int) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    by_name = get_gpt_layer_local_spec().submodules.self_attention.submodules.core_attention
    assert by_name is DotProductAttention
    with model_parallel(), installation(schedule="ring", kernel="cpu"):
        spec = get_gpt_layer_local_spec(num_experts=2).submodules.self_attention
        ours = spec.submodules.core_attention
        assert issubclass(ours, DistFlashCoreAttention)
        assert (ours.options.schedule, ours.options.kernel) == ("ring", "cpu")
        with pytest.raises(ValueError, match="asks for DotProductAttention by name"):
            build(by_name, tiny_config())
    with model_parallel():
        build(by_name, tiny_config())


def test_specs_get_our_attention_and_others_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(providers_case, world=1)


class StandInForTransformerEngine:
    def __init__(self, config: Any) -> None:
        self.config = config


def transformer_engine_case(rank: int, world: int) -> None:
    """With a stand-in for its attention: it needs a GPU."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    stock, provider = StandInForTransformerEngine, TESpecProvider()
    others = provider.linear()
    with (
        mock.patch.object(transformer_engine, "HAVE_TE", True),
        mock.patch.object(transformer_engine, "TEDotProductAttention", stock),
    ):
        with installation():
            assert issubclass(provider.core_attention(), DistFlashCoreAttention)
            assert provider.linear() is others
            with pytest.raises(ValueError, match="asks for StandIn.* by name"):
                stock(config=None)
        assert stock(config=7).config == 7


def test_transformer_engines_specs(rank_pool: RankPool) -> None:
    rank_pool.run(transformer_engine_case, world=1)


def state_space_case(rank: int, world: int) -> None:
    from megatron.core.ssm import mamba_context_parallel as mamba

    with installation():
        for reorder in (mamba._undo_attention_load_balancing, mamba._redo_attention_load_balancing):
            with pytest.raises(ValueError, match="State-space"):
                reorder(torch.arange(8), 2)


def test_layers_that_know_zigzag_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(state_space_case, world=1)
