"""Our flags on Megatron's command line, and the combinations that are refused before training."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from megatron_distflash import config
from megatron_distflash.config import DistFlashConfig
from megatron_distflash.mcore import support
from tests.mcore.harness import TINY_GPT, RankPool

GPT = [*TINY_GPT, "--transformer-impl", "local"]


# ---- the options themselves


def parse(*argv: str) -> DistFlashConfig | None:
    parser = config.add_flags(argparse.ArgumentParser(allow_abbrev=False))
    return config.from_args(parser.parse_args(argv))


def test_every_option_is_a_flag() -> None:
    text = "".join(config.add_flags(argparse.ArgumentParser()).format_help().split())
    assert "--distflash-attn" in text and text.count("distflashattention:") == 1
    for option in dataclasses.fields(DistFlashConfig):
        dashes = "--no-distflash-" if option.default is True else "--distflash-"
        assert dashes + option.name in text
        assert "".join(option.metadata["help"].split()) in text


def test_flags_make_a_config() -> None:
    assert parse() is None
    assert parse("--distflash-attn") == DistFlashConfig()
    given = parse("--distflash-attn", "--distflash-schedule", "ring", "--distflash-kernel", "cpu")
    assert given == DistFlashConfig(schedule="ring", kernel="cpu")


@pytest.mark.parametrize("flags", ["--distflash-schedule balanced", "--distflash-kernel cpu"])
def test_options_alone_are_refused(flags: str) -> None:
    with pytest.raises(ValueError, match=f"{flags.split()[0]} does nothing by itself"):
        parse(*flags.split())


def test_values_are_checked_without_a_command_line() -> None:
    with pytest.raises(ValueError, match="schedule must be one of auto, balanced, .*got 'fast'"):
        DistFlashConfig(schedule="fast")


def test_flags_are_found_among_others() -> None:
    argv = ["--lr", "1e-3", "--distflash-attn", "--bf16", "--distflash-schedule", "zigzag"]
    assert config.from_argv(argv) == DistFlashConfig(schedule="zigzag")
    assert config.from_argv(["--distflash-attention"]) is None  # Not ours: no abbreviations.


def test_nothing_heavy_is_imported_for_the_options() -> None:
    check = (
        "import sys, megatron_distflash, megatron_distflash.config, megatron_distflash.run;"
        "assert megatron_distflash.DistFlashConfig().contiguous;"
        "heavy = {'torch', 'numpy', 'megatron'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


# ---- through Megatron's own parser


def parsed(flags: list[str], provider: Any = None, undo: bool = True) -> argparse.Namespace:
    """Parse and validate as a pretrain script does, then put Megatron back as it was."""
    from megatron.training import arguments

    from megatron_distflash.mcore.arguments import register_arguments, unregister_arguments
    from megatron_distflash.mcore.install import uninstall

    register_arguments()
    register_arguments()  # The launcher and the script may both do it.
    try:
        with mock.patch.object(sys, "argv", ["pretrain.py", *flags]):
            return arguments.parse_and_validate_args(provider)
    finally:
        if undo:
            uninstall()
        unregister_arguments()


def add_script_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--script-flag", type=int, default=1)
    return parser


def accepted_case(rank: int, world: int, flags: list[str]) -> dict[str, Any]:
    args = parsed([*GPT, "--train-iters", "1", *flags], add_script_flag)
    picked = ("script_flag", "seq_length", "encoder_seq_length", "distflash_schedule")
    values = {name: getattr(args, name) for name in picked}
    assert {type(values["seq_length"]), type(values["encoder_seq_length"])} == {int}
    return values | {"mask": args.create_attention_mask_in_dataloader}


def help_case(rank: int, world: int) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit_info:
        parsed(["--help"], add_script_flag)
    assert exit_info.value.code == 0
    return out.getvalue()


def test_help_shows_one_group(rank_pool: RankPool) -> None:
    (text,) = rank_pool.run(help_case, world=1)
    title = f"\n{config.GROUP_TITLE}:\n"
    assert text.count(title) == 1 and "--script-flag" in text
    group = text.split(title)[1].split("\n\n")[0]
    assert "--distflash-attn" in group and "--distflash-schedule" in group


def test_flags_chain_with_the_scripts_own(rank_pool: RankPool) -> None:
    flags = ["--script-flag", "7", "--distflash-attn"]
    (values,) = rank_pool.run(accepted_case, flags, world=1)
    assert values["script_flag"] == 7
    assert values["distflash_schedule"] == "balanced"
    assert values["mask"] is False


def untouched_case(rank: int, world: int) -> None:
    from megatron.core import utils
    from megatron.core.models.backends import LocalSpecProvider

    before = (utils.get_batch_on_this_cp_rank, LocalSpecProvider.core_attention)
    args = parsed([*GPT, "--train-iters", "1"], undo=False)
    assert before == (utils.get_batch_on_this_cp_rank, LocalSpecProvider.core_attention)
    assert args.create_attention_mask_in_dataloader is True
    assert args.distflash_schedule is None


def test_without_the_flag_nothing_changes(rank_pool: RankPool) -> None:
    rank_pool.run(untouched_case, world=1)


@pytest.mark.parametrize("length", [63, 64, 66])
def test_any_multiple_of_the_context_parallel_size_will_do(
    rank_pool: RankPool, length: int
) -> None:
    size = 3 if length % 3 == 0 else 2
    flags = ["--distflash-attn", "--context-parallel-size", str(size), "--seq-length", str(length)]
    flags += ["--max-position-embeddings", "66"]
    for values in rank_pool.run(accepted_case, flags, world=size):
        assert values["seq_length"] == values["encoder_seq_length"] == length


# ---- refusals: what is on the command line, and what the sentence must say

REFUSED = {
    "cp_comm_type": ("--cp-comm-type a2a", "--cp-comm-type a2a .*--distflash-schedule"),
    "hierarchical_context_parallel_sizes": (
        "--hierarchical-context-parallel-sizes 1 1",
        "--hierarchical-context-parallel-sizes is not supported",
    ),
    "hybrid_context_parallel": ("--hybrid-context-parallel", "--hybrid-context-parallel changes"),
    "attention_dropout": ("--attention-dropout 0.1", "dropout .0.1.*--attention-dropout 0"),
    "window_size": ("--window-size 128,0", "Sliding-window attention .--window-size 128 0"),
    "softmax_type": ("--softmax-type learnable", "--softmax-type learnable.*vanilla"),
    "multi_latent_attention": ("--multi-latent-attention", "Multi-latent attention"),
    "position_embedding_type": ("--position-embedding-type relative", "adds a bias.*use rope"),
    "qk_clip": ("--qk-clip", "--qk-clip needs the largest"),
    "log_max_attention_logit": ("--log-max-attention-logit", "--log-max-attention-logit needs"),
    "batch_invariant_mode": ("--batch-invariant-mode", "--batch-invariant-mode needs its own"),
    "reset_attention_mask": ("--reset-attention-mask", "--reset-attention-mask: packed"),
    "dataloader_inter_document_masking": (
        "--dataloader-inter-document-masking",
        "--dataloader-inter-document-masking: packed",
    ),
    "sft": ("--sft", "--sft: packed"),
    "attention_backend": ("--attention-backend unfused", "unfused .*--distflash-kernel"),
    "use_flash_attn": ("--use-flash-attn", "--use-flash-attn chooses a stock"),
    "use_kitchen_attention": ("--use-kitchen-attention", "--use-kitchen-attention brings"),
    "transformer_impl": (
        "--transformer-impl inference_optimized",
        "inference_optimized (is not supported|cannot run)",  # CPU ranks refuse it, too.
    ),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern M*-", "--hybrid-layer-pattern is not"),
    "hybrid_override_pattern": ("--hybrid-override-pattern M*-", "--hybrid-override-pattern is"),
    "is_hybrid_model": ("--is-hybrid-model", "A hybrid .state-space. model is not supported"),
    "experimental_attention_variant": (
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant dsa is not supported",
    ),
    "heterogeneous_layers_config_path": (
        "--heterogeneous-layers-config-path layers.json",
        "--heterogeneous-layers-config-path is not supported",
    ),
    "heterogeneous_layers_config_encoded_json": (
        "--heterogeneous-layers-config-encoded-json {}",
        "--heterogeneous-layers-config-encoded-json is not supported",
    ),
    "cuda_graph_impl": ("--cuda-graph-impl local", "--cuda-graph-impl local "),
    "enable_cuda_graph": ("--enable-cuda-graph", "--enable-cuda-graph "),
    "external_cuda_graph": ("--external-cuda-graph", "--external-cuda-graph "),
    "offload_modules": ("--offload-modules core_attn", "--offload-modules core_attn frees"),
    "flash_decode": ("--flash-decode", "--flash-decode is for inference"),
    "perform_rl_step": ("--perform-rl-step", "--perform-rl-step generates text"),
}
# No flag of megatron-core 0.19 sets these; a config or a later version does.
REFUSED_SETTINGS = {
    "fp8_dot_product_attention": (True, "fp8_dot_product_attention off"),
    "fp8_multi_head_attention": (True, "fp8_multi_head_attention off"),
    "use_kitchen": (True, "--use-kitchen builds layers"),
    "mtp_hsm": (True, "--mtp-hsm moves hidden states"),
}


def refusal_case(rank: int, world: int, flags: list[str]) -> str:
    """What parsing says, which must be an error."""
    with pytest.raises(ValueError) as error:
        parsed([*GPT, "--train-iters", "1", *flags])
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_the_command_line(rank_pool: RankPool, name: str) -> None:
    flags, match = REFUSED[name]
    (message,) = rank_pool.run(refusal_case, [*flags.split(), "--distflash-attn"], world=1)
    assert_one_sentence(message, match)


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_refused_settings(name: str) -> None:
    value, match = REFUSED_SETTINGS[name]
    (message,) = support.problems(argparse.Namespace(**{name: value}))
    assert_one_sentence(message, match)


def assert_one_sentence(message: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        raise ValueError(message)
    assert message.endswith(".") and "\n" not in message
    assert "--distflash-attn" in message or "CPU ranks" in message


def test_every_rule_has_a_test() -> None:
    assert {rule.name for rule in support.RULES} == set(REFUSED) | set(REFUSED_SETTINGS)


@pytest.mark.parametrize(
    ("flags", "world", "match"),
    [
        ("--distflash-schedule ring", 1, "--distflash-schedule does nothing by itself"),
        (
            "--distflash-attn --context-parallel-size 3",
            3,
            "--seq-length 64 must be a multiple of 3, the context parallel size",
        ),
        (
            "--distflash-attn --distflash-schedule zigzag --context-parallel-size 2 "
            "--seq-length 62",
            2,
            "--seq-length 62 must be a multiple of 4, 2 . the context parallel size",
        ),
        (
            "--distflash-attn --context-parallel-size 2 --tensor-model-parallel-size 2 "
            "--sequence-parallel --seq-length 62",
            4,
            "--seq-length 62 must be a multiple of 4, the context times the tensor",
        ),
        (
            "--distflash-attn --distflash-kernel cudnn",
            1,
            "--distflash-kernel cudnn needs a GPU, and there is none",
        ),
        (
            "--distflash-attn --distflash-comm copy",
            1,
            "--distflash-comm copy moves GPU memory, and there is no GPU",
        ),
        (
            "--distflash-attn --deterministic-mode --distflash-kernel cudnn",
            1,
            "kernel cudnn does not promise .* --deterministic-mode asks for: leave it out",
        ),
    ],
)
def test_combinations_that_are_refused(
    rank_pool: RankPool, flags: str, world: int, match: str
) -> None:
    for message in rank_pool.run(refusal_case, flags.split(), world=world):
        with pytest.raises(ValueError, match=match):
            raise ValueError(message)


@pytest.mark.parametrize("flags", [["--distflash-attn"], []])
def test_yaml_file_in_place_of_the_command_line(flags: list[str]) -> None:
    from megatron_distflash.mcore.arguments import _parse_args

    from_file = argparse.Namespace(yaml_cfg="model.yaml")
    parse_args = _parse_args(lambda provider: from_file)
    with mock.patch.object(sys, "argv", ["pretrain.py", "--yaml-cfg", "model.yaml", *flags]):
        if flags:
            with pytest.raises(ValueError, match="--yaml-cfg replaces the command line"):
                parse_args()
        else:
            assert parse_args() is from_file


def test_every_problem_is_told_at_once(rank_pool: RankPool) -> None:
    flags = ["--distflash-attn", "--sft", "--qk-clip"]
    (message,) = rank_pool.run(refusal_case, flags, world=1)
    assert [line.split()[0] for line in message.splitlines()] == ["--qk-clip", "--sft:"]


GPU_ARGUMENTS = {
    "bf16": True,
    "fp16": False,
    "kv_channels": None,
    "hidden_size": 256,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("changed", "kernel", "match"),
    [
        ({}, "cpu", "takes no GPU tensors"),
        ({"bf16": False}, "auto", "add --bf16"),
        ({"kv_channels": 260}, "auto", "head dim of 260 .* multiple of 8 up to 256"),
        ({"hidden_size": 512}, "cudnn", "head dim of 256 .* multiple of 8 up to 128"),
        ({"kv_channels": 60}, "flash", "head dim of 60 "),
        ({"kv_channels": 160}, "fa4", "head dim of 160 .* multiple of 8 up to 128"),
        ({"kv_channels": 80}, "cuda", "head dim of 80 .* one of 64, 96, 128, 192, 256"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(changed: dict, kernel: str, match: str) -> None:
    options = config.DistFlashConfig(kernel=kernel)
    with mock.patch("torch.cuda.is_available", return_value=True):
        fine = argparse.Namespace(**GPU_ARGUMENTS)
        assert support._device_problems(fine, config.DistFlashConfig()) == []
        unset = argparse.Namespace(**GPU_ARGUMENTS | {"hidden_size": None})
        assert support._device_problems(unset, config.DistFlashConfig()) == []
        wrong = argparse.Namespace(**GPU_ARGUMENTS | changed)
        (message,) = support._device_problems(wrong, options)
    assert re.search(match, message) and message.endswith(".")
