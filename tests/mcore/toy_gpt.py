"""A small pretraining script on megatron-core's wheel, run in-process by the test harness.

It goes the way of Megatron-LM's pretrain_gpt.py: same argument parsing, model building, batch
broadcast and slicing, schedules and loss function contract. Only the data is made up.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import mpu
from megatron.core import utils as megatron_utils
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


class RandomText(torch.utils.data.Dataset):
    """Samples in which half the tokens follow from their predecessor and half are random.

    So the loss can fall, and every token position and every sample is different. Sample ``idx`` is
    the same on all ranks and in all configurations.

    Args:
        prompt_tokens: the loss of the first 0..prompt_tokens tokens of a sample is masked.
    """

    split = None

    def __init__(
        self, num_samples: int, seq_tokens: int, vocab_size: int, seed: int, prompt_tokens: int
    ) -> None:
        self.num_samples = num_samples
        self.seq_tokens = seq_tokens
        self.vocab_size = vocab_size
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        generator = torch.Generator().manual_seed(seed)
        self.successor = torch.randperm(vocab_size, generator=generator).tolist()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """tokens, labels, position_ids [s] int64; loss_mask [s] fp32."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(idx) + 1)
        noise = torch.randint(self.vocab_size, (self.seq_tokens + 1,), generator=generator)
        follows = torch.rand(self.seq_tokens + 1, generator=generator) < 0.5
        text = noise.tolist()
        for i in range(1, len(text)):
            if follows[i]:
                text[i] = self.successor[text[i - 1]]
        tokens = torch.tensor(text)
        loss_mask = torch.ones(self.seq_tokens)
        if self.prompt_tokens:
            masked = torch.randint(self.prompt_tokens + 1, (), generator=generator)
            loss_mask[: int(masked)] = 0.0
        return {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self.seq_tokens),
        }


def datasets_provider(
    num_samples: list[int], vp_stage: int | None = None, *, prompt_tokens: int
) -> tuple[RandomText | None, ...]:
    """Train, validation and test set, where the stock script builds them: on the first
    tensor-parallel rank of the first and last pipeline stages."""
    args = get_args()
    if mpu.get_tensor_model_parallel_rank() != 0 or not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None
    return tuple(
        RandomText(max(n or 0, 1), args.seq_length, args.vocab_size, args.seed + i, prompt_tokens)
        for i, n in enumerate(num_samples)
    )


def get_batch(data_iterator: Iterator[dict[str, Any]], vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next micro-batch: broadcast over TP, then sliced over CP."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    batch: dict[str, Any] = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {key: value.cuda() for key, value in next(data_iterator).items()}
        batch["attention_mask"] = None
    batch = megatron_utils.get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return megatron_utils.get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=False,
    )


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sum of the token losses, their number, and the pair to be reported."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: torch.nn.Module) -> Any:
    vp_stage = megatron_utils.get_attr_wrapped_model(model, "vp_stage")
    batch = get_batch(data_iterator, vp_stage)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def run(argv: list[str], prompt_tokens: int) -> list[tuple[float, float]]:
    """Train as ``argv`` says; returns (loss, grad norm) of every iteration."""
    records: list[tuple[float, float]] = []
    stock_log = training.training_log

    def training_log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss, grad_norm = loss_dict.get("lm loss", math.nan), args[6]
        records.append((float(loss), math.nan if grad_norm is None else float(grad_norm)))
        return stock_log(loss_dict, *args, **kwargs)

    provider = partial(datasets_provider, prompt_tokens=prompt_tokens)
    provider.is_distributed = True
    full_argv = ["toy_gpt.py", "--log-interval", "1", *argv]
    with (
        mock.patch.object(sys, "argv", full_argv),
        mock.patch.object(training, "training_log", training_log),
    ):
        args = parse_and_validate_args()
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        try:
            pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
        except SystemExit as end:  # How --exit-interval ends a run.
            if end.code:
                raise
    return records
