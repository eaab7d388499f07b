"""One row of tools/bench_train.py: trains a few layers one way, at the lengths it is asked for.

A process of its own, or one for each rank, so that running out of memory ends one row and no other.
It imports what it needs, says so, and then answers requests (``bench_ranks``):

    {"tokens": 32768, "iterations": 3}   ->  {"status": "ok", "iteration_s": […], "loss": …, …}

With several ranks (WORLD_SIZE) they share one sequence of so many tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import bench_ranks

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train.

    Attributes:
        attention: ``stock`` (Transformer Engine's; Megatron's own on CPU ranks) or ``ours``.
        recompute: what is recomputed: ``none``, ``full`` or ``core_attn``.
        options: fields of DistFlashConfig.
        fp8: linear layers in fp8.
        parallel: how several ranks share the work: ``cp``, context parallelism, or ``tp``, tensor
            and sequence parallelism.
    """

    attention: str
    recompute: str
    options: tuple[tuple[str, bool | str], ...] = ()
    fp8: bool = False
    parallel: str = "cp"


ROWS = {
    "stock-none": Row("stock", "none"),
    "stock-full": Row("stock", "full"),
    "stock-tp-none": Row("stock", "none", parallel="tp"),
    "stock-tp-full": Row("stock", "full", parallel="tp"),
    "stock-core-attn": Row("stock", "core_attn"),
    "ours-none": Row("ours", "none"),
    "ours-no-remat": Row("ours", "full", (("remat", False),)),
    "ours-remat": Row("ours", "full"),
    "ours-remat-cudnn": Row("ours", "full", (("kernel", "cudnn"),)),
    "ours-offload": Row("ours", "full", (("offload", True),)),
    "ours-no-remat-fp8": Row("ours", "full", (("remat", False),), fp8=True),
    "ours-remat-fp8": Row("ours", "full", fp8=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's size. The vocabulary is small, so that layers and not logits set the peak."""

    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int


SHAPES = {
    "llama-8b-layers": Shape(4, 4096, 14336, 32, 8, 8192),
    "llama-8b-2-layers": Shape(2, 4096, 14336, 32, 8, 8192),
    "tiny": Shape(2, 64, 128, 4, 2, 256),
}


class Trainer:
    """A model, its optimizer, and whole training iterations on random tokens.

    The learning rate is 0: the optimizer does its work, but every iteration at one length repeats
    the same losses, whichever row has run how many.
    """

    def __init__(self, row: Row, shape: Shape) -> None:
        import torch

        self.on_gpu = torch.cuda.is_available()
        self.shape = shape
        _start_megatron(self.on_gpu, row.parallel)
        config = _transformer_config(row, shape, self.on_gpu)
        self.model = _model(config, shape, self.on_gpu)
        self.optimizer = _optimizer(self.model, self.on_gpu)
        self.static_bytes = torch.cuda.memory_allocated()

    def run(self, num_tokens: int, num_iterations: int) -> dict[str, Any]:
        """Time that many iterations on sequences of one length."""
        import torch

        batch = self._batch(num_tokens)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(num_iterations):
            torch.cuda.synchronize()
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss, grad_norm = self._iteration(batch)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "iteration_s": seconds,
            "static_bytes": self.static_bytes,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "usable_bytes": self._usable_bytes(),
        }

    def _iteration(self, batch: dict[str, Any]) -> tuple[float, float]:
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(**batch).float().mean()
        loss.backward()
        finalize_model_grads([self.model])
        _, grad_norm, _ = self.optimizer.step()
        return float(_mean_over_sequence(loss.detach())), float(grad_norm)

    def _batch(self, num_tokens: int) -> dict[str, Any]:
        """This rank's part of one sequence: input_ids, position_ids and labels [1, tokens]."""
        import torch
        from megatron.core import parallel_state, utils

        generator = torch.Generator().manual_seed(num_tokens)
        text = torch.randint(self.shape.vocabulary, (1, num_tokens + 1), generator=generator).cuda()
        whole = {
            "input_ids": text[:, :-1].contiguous(),
            "position_ids": torch.arange(num_tokens, device=text.device)[None],
            "attention_mask": None,
            "labels": text[:, 1:].contiguous(),
        }
        if parallel_state.get_context_parallel_world_size() == 1:
            return whole
        group = parallel_state.get_context_parallel_group()
        return utils.get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=group)

    @staticmethod
    def _usable_bytes() -> int:
        """What torch's allocator could hold: the device without what others use of it."""
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()


def _mean_over_sequence(loss: Any) -> Any:
    """The ranks' equal parts of a sequence have its mean loss together."""
    import torch
    from megatron.core import parallel_state

    num_ranks = parallel_state.get_context_parallel_world_size()
    if num_ranks > 1:
        torch.distributed.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return loss / num_ranks


def _num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _start_megatron(on_gpu: bool, parallel: str) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    rank, num_ranks = int(os.environ.get("RANK", "0")), _num_ranks()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = f"file://{tempfile.mktemp(prefix='bench-train-store-')}"
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method="env://" if num_ranks > 1 else alone,
        rank=rank,
        world_size=num_ranks,
    )
    parallel_state.initialize_model_parallel(**_sizes(parallel))
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def _sizes(parallel: str) -> dict[str, int]:
    """Megatron's names of the parallel sizes."""
    name = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}[parallel]
    return {name: _num_ranks()}


def _transformer_config(row: Row, shape: Shape, on_gpu: bool) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {}
    if row.recompute == "full":
        settings = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif row.recompute == "core_attn":
        settings = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if _num_ranks() > 1:
        settings |= _sizes(row.parallel) | {"sequence_parallel": row.parallel == "tp"}
    if row.fp8:
        settings |= {"fp8": "hybrid", "fp8_recipe": "delayed"}
    if on_gpu:
        # Gradient accumulation is not fused: the output layer would need apex for it.
        settings |= {
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "bias_activation_fusion": True,
            "apply_rope_fusion": True,
        }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not on_gpu,
        **settings,
    )


def _model(config: Any, shape: Shape, on_gpu: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.module import Float16Module

    if on_gpu:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=2**20,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    if config.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )


def _optimizer(model: Any, on_gpu: bool) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtypes = {"bf16": True, "params_dtype": torch.bfloat16} if on_gpu else {}
    config = OptimizerConfig(optimizer="adam", lr=0.0, weight_decay=0.0, clip_grad=1.0, **dtypes)
    return get_megatron_optimizer(config, [model])


def _import_megatron(row: Row) -> None:
    """All that takes long and needs no GPU; then our parts, if the row is ours."""
    from megatron_distflash.mcore import cpu

    if cpu.needed():
        cpu.enable()
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not cpu.needed() and not HAVE_TE:
        raise ValueError(
            "Stock Megatron's fast layers are Transformer Engine's: install transformer-engine to "
            "compare with them."
        )
    if row.attention == "ours":
        from megatron_distflash.config import DistFlashConfig
        from megatron_distflash.mcore.install import install

        install(DistFlashConfig(**dict(row.options)))


def _prepare(row: Row, shape: Shape) -> Callable[[dict[str, Any]], dict[str, Any]]:
    _import_megatron(row)
    trainers: list[Trainer] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        import torch

        try:
            if not trainers:
                trainers.append(Trainer(row, shape))
            done = trainers[0].run(request["tokens"], request["iterations"])
            return {"status": "ok"} | done
        except torch.OutOfMemoryError as error:
            return {"status": OUT_OF_MEMORY, "message": str(error).splitlines()[0]}

    return answer


def main() -> None:
    """Arguments: a row, a shape, and as JSON what of ours is to be other than in the row."""
    row_name, shape_name, options = sys.argv[1:]
    row = ROWS[row_name]
    if row.attention == "ours":
        row = replace(row, options=tuple((dict(row.options) | json.loads(options)).items()))
    bench_ranks.serve(lambda: _prepare(row, SHAPES[shape_name]))


if __name__ == "__main__":
    main()
