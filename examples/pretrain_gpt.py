"""Pretrain a GPT with Megatron, on the megatron-core wheel alone: no Megatron-LM checkout needed.

All of Megatron's flags work, and with the launcher distflash's do too:

    torchrun --nproc-per-node 8 -m megatron_distflash.run examples/pretrain_gpt.py \\
        --distflash-attn --context-parallel-size 8 ...

The launcher runs a Megatron-LM checkout's own pretrain_gpt.py just as well. This script has what
pretraining on text needs (data, tensor, pipeline and context parallelism, checkpoints, validation)
and leaves out Megatron-LM's variants: fine-tuning formats, distillation, fill-in-the-middle.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor | None]
DatasetSplits = Sequence[Any]  # training, validation, test; None for a split that is not built

# Everything a pretraining batch holds: [b, s], the attention mask [b, 1, s, s].
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """This rank's part of the next batch: [b, s_local], all None on inner pipeline stages.

    Tensor-parallel rank 0 reads the batch and hands it to its peers; then every context-parallel
    rank keeps its part of the sequence.
    """
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: Batch = {}
    if tp_rank == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        present = {key: sample[key] for key in BATCH_KEYS if sample.get(key) is not None}
        batch = dict.fromkeys(BATCH_KEYS)
        batch |= {key: value.cuda(non_blocking=True) for key, value in present.items()}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def loss_function(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(summed loss, number of tokens it is summed over, what the log averages over all ranks).

    loss_mask, token_losses: [b, s_local].
    """
    loss_mask = loss_mask.view(-1).float()
    loss = (token_losses.view(-1).float() * loss_mask).sum()
    num_tokens = loss_mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: not torch.isfinite(value),
            message="the loss of this rank's tokens is not finite",
            fatal=True,
        )
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator[Batch] | None, model: GPTModel):
    """One micro-batch through the model: (per-token losses or activations, loss function)."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_function, batch["loss_mask"])


def make_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> DatasetSplits:
    """The training, validation and test datasets, on the ranks that read data.

    num_samples: how many samples of sequence_length tokens each of the three has to give.
    """
    args = get_args()
    print_rank_0("> building the datasets ...")

    def reads_data() -> bool:
        first_or_last = is_first_or_last_pipeline_stage(vp_stage)
        return first_or_last and mpu.get_tensor_model_parallel_rank() == 0

    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset_class, num_samples, reads_data, make_dataset_config(args)
    ).build()


# Megatron calls a provider on every rank only if it says so; `reads_data` decides here.
make_datasets.is_distributed = True


def make_dataset_config(args: Any) -> GPTDatasetConfig:
    """How the token files named by --data-path become samples."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def refuse_unread_flags(args: Any) -> None:
    """Flags that Megatron accepts and that only its own scripts act on must not pass silently."""
    unread = {
        "sft": "--sft",
        "fim_data": "--fim-data",
        "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
        "hybrid_context_parallel": "--hybrid-context-parallel",
        "logits_load_dir": "--logits-load-dir",
        "mtp_num_layers": "--mtp-num-layers",
    }
    for name, flag in unread.items():
        if getattr(args, name, None):
            raise ValueError(
                f"{flag} is not supported by this script; run Megatron-LM's own pretrain_gpt.py "
                "through megatron_distflash.run instead"
            )


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_unread_flags(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, make_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
