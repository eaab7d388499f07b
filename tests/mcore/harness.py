"""Run many Megatron configurations inside one set of CPU rank processes.

Importing Megatron takes ten seconds, so it happens once per pytest session, and every case runs
inside the same forked ranks (see tests/workers.py):

    def rank_sum(rank: int, world: int, scale: float) -> float:   # module-level: it is pickled
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(rank_pool):                        # fixture of tests/mcore/conftest.py
        assert rank_pool.run(rank_sum, 2.0, world=3) == [6.0, 6.0, 6.0]

    def test_tensor_parallel(rank_pool):
        one = rank_pool.train(TINY_GPT, iterations=3, world=1)
        two = rank_pool.train([*TINY_GPT, "--tensor-model-parallel-size", "2"], 3, world=2)

In a case, torch.distributed is up over gloo and Megatron runs on CPU ranks; ``model_parallel``
sets up parallel_state for cases that call Megatron's parts themselves, and ``train`` goes through
``megatron.training.pretrain``. After every case the process group and all of Megatron's global
state are torn down, also when the case failed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from tests.workers import Seat, WorkerError, WorkerPool

RankError = WorkerError  # A case failed on some rank.

# A GPT of the demo's kind (RoPE, GQA, SwiGLU, RMSNorm), small enough for 0.1 s per iteration.
# Later flags win, so append to override.
TINY_GPT = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 4 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --lr 1e-3 --lr-decay-style constant --lr-decay-iters 100 --clip-grad 1.0 "
    "--weight-decay 0.01 --tokenizer-type NullTokenizer --vocab-size 255 "
    "--make-vocab-size-divisible-by 64 --eval-interval 1000 --eval-iters 0"
)


class Iteration(NamedTuple):
    """What Megatron logs for one iteration."""

    loss: float  # Mean over the global batch; nan on ranks without the last pipeline stage.
    grad_norm: float  # Global, before clipping.


class RankPool:
    """Persistent CPU ranks, started when a case first needs them.

    Args:
        max_world: the most ranks that a case may use.
    """

    def __init__(self, max_world: int = 8) -> None:
        self._pool = WorkerPool(
            max_world, modules=("tests.mcore.cpu_ranks",), prepare=_use_one_core, around=_ranks
        )

    def run(
        self, function: Callable[..., Any], *args: Any, world: int, timeout_s: float = 240.0
    ) -> list[Any]:
        """Run ``function(rank, world, *args)`` on ``world`` ranks; returns the results by rank.

        Args:
            function: a module-level function; it, ``args`` and the results are pickled.
            timeout_s: when it is over, the ranks are killed; the next case starts fresh ones.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        return self._pool.run(function, *args, world=world, timeout_s=timeout_s)

    def train(
        self, args: list[str], iterations: int, *, world: int, timeout_s: float = 240.0, **data: Any
    ) -> list[Iteration]:
        """``train`` on ``world`` ranks; returns the last rank's record."""
        job = [*args, "--train-iters", str(iterations)]
        return self.run(_train_case, job, data, world=world, timeout_s=timeout_s)[-1]

    def close(self) -> None:
        """End the rank processes."""
        self._pool.close()


def _use_one_core(seat: Seat) -> None:
    """All ranks share the machine's few cores."""
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def _ranks(seat: Seat) -> Iterator[tuple[int, int]]:
    """The process group of one case, and a clean Megatron after it."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.world),
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{seat.directory}/store{seat.run_idx}",
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=seat.timeout_s),
    )
    try:
        yield seat.rank, seat.world
        dist.barrier()  # A rank that fails must not find its peers gone already.
    finally:
        reset_megatron()
        dist.destroy_process_group()
        # Models refer to their groups in circles, and every group holds two threads until it goes.
        gc.collect()


def reset_megatron() -> None:
    """Forget all global state of Megatron in this process."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.utils import StragglerDetector
    from megatron.training import checkpointing, training

    training.destroy_global_state()
    megatron_random._CUDA_RNG_STATE_TRACKER = None
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    checkpointing._CHECKPOINT_VERSION = None
    checkpointing._LOADED_ITERATION = None
    StragglerDetector._configured = False
    # A rank with timestamps of an earlier run makes other collectives than a fresh one.
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    training._seqlen_stats_in_iteration = None
    training._seqlen_stats_active = False


@contextlib.contextmanager
def model_parallel(seed: int = 1234, **sizes: int) -> Iterator[None]:
    """parallel_state and the RNG tracker inside a case that calls Megatron's parts itself.

    Args:
        sizes: arguments of ``initialize_model_parallel``, such as tensor_model_parallel_size=2.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _train_case(rank: int, world: int, args: list[str], data: dict[str, Any]) -> list[Iteration]:
    return train(args, **data)


def train(
    args: list[str], iterations: int | None = None, *, prompt_tokens: int = 0
) -> list[Iteration]:
    """Train a GPT in this rank through ``megatron.training.pretrain``; call it on every rank.

    Args:
        args: Megatron's command line, without the program name.
        iterations: ``--train-iters``, unless ``args`` has it.
        prompt_tokens: mask the loss of up to that many leading tokens of each sample, a number
            that differs from sample to sample.

    Returns:
        One record per iteration, as training_log got it on this rank. A run that ends early by
        ``--exit-interval`` returns what it has.
    """
    from tests.mcore import toy_gpt

    argv = [*args] if iterations is None else [*args, "--train-iters", str(iterations)]
    return [Iteration(*record) for record in toy_gpt.run(argv, prompt_tokens)]
