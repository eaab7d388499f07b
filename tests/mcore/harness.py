"""Run many Megatron configurations inside one set of CPU rank processes.

Importing Megatron takes a process about ten seconds, so the ranks are started once per pytest
session and every case runs inside them:

    def rank_zero_sum(rank: int, world: int, scale: float) -> float:   # module-level: it is pickled
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(rank_pool):                        # fixture of tests/mcore/conftest.py
        assert rank_pool.run(rank_zero_sum, 2.0, world=3) == [6.0, 6.0, 6.0]

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
import multiprocessing
import multiprocessing.connection
import os
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

LOG_TAIL_CHARS = 1500
GRACE_S = 10.0  # After one rank failed, the others have that long to notice.

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


class RankError(AssertionError):
    """A case failed on some rank; the message holds each failing rank's traceback and log tail."""


class RankPool:
    """Persistent CPU rank processes, started when a case first needs them.

    Args:
        max_world: the most ranks that a case may use.
    """

    def __init__(self, max_world: int = 8) -> None:
        self.max_world = max_world
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._dir = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._num_runs = 0

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
        if not 1 <= world <= self.max_world:
            raise ValueError(f"world must be from 1 to {self.max_world}, not {world}.")
        while len(self._workers) < world:
            index = len(self._workers)
            self._workers.append(_Worker(self._context, self._dir / f"rank{index}.log"))
        self._num_runs += 1
        store = self._dir / f"store{self._num_runs}"
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.send(_Case(function, args, rank, world, str(store), timeout_s))
        return self._collect(workers, timeout_s)

    def train(
        self, args: list[str], iterations: int, *, world: int, timeout_s: float = 240.0, **data: Any
    ) -> list[Iteration]:
        """``train`` on ``world`` ranks; returns the last rank's record."""
        job = [*args, "--train-iters", str(iterations)]
        return self.run(_train_case, job, data, world=world, timeout_s=timeout_s)[-1]

    def close(self) -> None:
        """End the rank processes and delete their logs."""
        self._kill()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[Any]:
        """Results by rank. The ranks that answer are kept; the others are killed."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[str] = []
        pending = dict(enumerate(workers))
        while pending:
            connections = {worker.connection: rank for rank, worker in pending.items()}
            ready = multiprocessing.connection.wait(
                list(connections), timeout=max(0.0, deadline - time.monotonic())
            )
            for connection in ready:
                rank = connections[connection]
                ok, value = pending.pop(rank).receive()
                if ok:
                    results[rank] = value
                    continue
                failures.append(f"rank {rank}: {value}")
                # The others may wait for this rank in a collective.
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                failures += [f"rank {r}: no answer.{w.log_tail()}" for r, w in pending.items()]
                break
        if pending or any(not worker.alive() for worker in workers):
            self._kill()
        if failures:
            raise RankError("\n".join(failures))
        return [results[rank] for rank in range(len(workers))]


class _Case(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world: int
    store: str
    timeout_s: float


class _Worker:
    """The test's end of one rank process."""

    def __init__(self, context: Any, log_path: Path) -> None:
        self.log_path = log_path
        self.connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_worker_main, args=(child_end, str(log_path)), daemon=True
        )
        self._process.start()
        child_end.close()

    def send(self, case: _Case) -> None:
        self.connection.send(case)

    def receive(self) -> tuple[bool, Any]:
        """(True, result), or (False, error text) also when the process died."""
        try:
            ok, value = self.connection.recv()
        except EOFError:
            self._process.join(5)
            return False, f"died with exit code {self._process.exitcode}.{self.log_tail()}"
        return (True, value) if ok else (False, value + self.log_tail())

    def alive(self) -> bool:
        return self._process.is_alive()

    def log_tail(self) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return f"\n--- end of its log ---\n{text[-LOG_TAIL_CHARS:]}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _worker_main(connection: Any, log_path: str) -> None:
    """Life of a rank process: one case after the other until the pool kills it."""
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout.reconfigure(line_buffering=True)
    # Also on a machine with GPUs these are CPU ranks; must be set before torch looks for devices.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    import torch

    from megatron_distflash.mcore import cpu

    torch.set_num_threads(1)
    cpu.enable()
    while True:
        case = connection.recv()
        os.truncate(log_path, 0)
        try:
            answer = (True, _run_case(case))
        except BaseException:  # A SystemExit of Megatron is a failure of the case, too.
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except Exception:  # The result cannot be pickled.
            connection.send((False, traceback.format_exc()))


def _run_case(case: _Case) -> Any:
    """One case on one rank, with the process group up; tears everything down afterwards."""
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(case.rank),
        "LOCAL_RANK": str(case.rank),
        "WORLD_SIZE": str(case.world),
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{case.store}",
        rank=case.rank,
        world_size=case.world,
        timeout=timedelta(seconds=case.timeout_s),
    )
    try:
        result = case.function(case.rank, case.world, *case.args)
        dist.barrier()  # A rank that fails must not find its peers gone already.
        return result
    finally:
        reset_megatron()
        dist.destroy_process_group()


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
        One record per iteration, as training_log got it on this rank.
    """
    from tests.mcore import toy_gpt

    argv = [*args] if iterations is None else [*args, "--train-iters", str(iterations)]
    return [Iteration(*record) for record in toy_gpt.run(argv, prompt_tokens)]
