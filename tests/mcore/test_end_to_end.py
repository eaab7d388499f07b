"""Whole training runs with ``--distflash-attn`` against stock Megatron without context parallelism.

Real processes over gloo, fp32. The two runs add up the same numbers in another order, so losses and
gradient norms agree to about 1e-6; 1e-4 is what is promised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.mcore import harness
from tests.mcore.harness import Iteration, RankPool

TOLERANCE = 1e-4
ITERATIONS = 3
GPT = [*harness.TINY_GPT, "--eval-interval", "1000"]
# Weights so large that attention looks at single tokens: then positions matter to the loss.
SHARP = "--init-method-std 0.3"


def train_case(
    rank: int, world: int, args: list[str], prompt: int, stock_rope: bool
) -> list[Iteration]:
    """``harness.train`` with our flags known to Megatron's parser, as the launcher does it."""
    from megatron_distflash.mcore.arguments import register_arguments, unregister_arguments
    from megatron_distflash.mcore.install import uninstall

    with contextlib.ExitStack() as stack:
        stack.enter_context(masked_prompt(prompt))
        if stock_rope:
            stack.enter_context(unpatched_rope())
        stack.callback(unregister_arguments)
        stack.callback(uninstall)
        register_arguments()
        return harness.train(args)


@contextlib.contextmanager
def masked_prompt(num_tokens: int) -> Iterator[None]:
    """Mask the loss of exactly the first tokens of every sample."""
    from tests.mcore.toy_gpt import RandomText

    stock = RandomText.__getitem__

    def getitem(self: RandomText, idx: int) -> dict[str, Any]:
        sample = stock(self, idx)
        sample["loss_mask"][:num_tokens] = 0.0
        return sample

    with mock.patch.object(RandomText, "__getitem__", getitem):
        yield


@contextlib.contextmanager
def unpatched_rope() -> Iterator[None]:
    """Install everything but the rotary table, the mistake that no error tells."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_distflash.mcore import layout

    with mock.patch.object(
        layout, "pos_emb_on_this_cp_rank", rope_utils.get_pos_emb_on_this_cp_rank
    ):
        yield


class Runner:
    """Runs cases on a pool; keeps the results of stock runs, which many cases compare with."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool
        self._stock: dict[Any, list[Iteration]] = {}

    def distflash(
        self,
        flags: str,
        *,
        world: int,
        iterations: int = ITERATIONS,
        prompt: int = 0,
        stock_rope: bool = False,
    ) -> list[Iteration]:
        flags = f"{flags} --distflash-attn"
        return self._train(flags, world, iterations, prompt, stock_rope)

    def stock(
        self, flags: str, *, world: int = 1, iterations: int = ITERATIONS, prompt: int = 0
    ) -> list[Iteration]:
        key = (flags, world, iterations, prompt)
        if key not in self._stock:
            self._stock[key] = self._train(flags, world, iterations, prompt)
        return self._stock[key]

    def _train(
        self, flags: str, world: int, iterations: int, prompt: int, stock_rope: bool = False
    ) -> list[Iteration]:
        args = [*GPT, *flags.split(), "--train-iters", str(iterations)]
        return self.pool.run(train_case, args, prompt, stock_rope, world=world)[-1]


@pytest.fixture(scope="module")
def runner(rank_pool: RankPool) -> Runner:
    return Runner(rank_pool)


def assert_same(ours: list[Iteration], stock: list[Iteration]) -> None:
    assert len(ours) == len(stock) > 0
    for mine, reference in zip(ours, stock, strict=True):
        assert mine.loss == pytest.approx(reference.loss, rel=0, abs=TOLERANCE)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=TOLERANCE)


@pytest.mark.parametrize("schedule", ["balanced", "paper", "ring", "zigzag"])
def test_context_parallel(runner: Runner, schedule: str) -> None:
    flags = f"{SHARP} --context-parallel-size 4 --distflash-schedule {schedule}"
    assert_same(runner.distflash(flags, world=4), runner.stock(SHARP))


# Flags of our run, of its counterpart without context parallelism, and the latter's ranks.
COMBINED = {
    "cp1": ("", "", 1),
    "cp3": ("--seq-length 63 --context-parallel-size 3", "--seq-length 63", 1),
    "tp2": (
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        "--tensor-model-parallel-size 2",
        2,
    ),
    "tp2-sequence-parallel": (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
    ),
    "pp2": (
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        2,
    ),
    "dp2": ("--context-parallel-size 2", "", 2),
}


@pytest.mark.parametrize("case", COMBINED)
def test_combined_with_other_parallelism(runner: Runner, case: str) -> None:
    ours, stock, stock_world = COMBINED[case]
    size = int(ours.split()[-1]) if ours else 1
    assert_same(
        runner.distflash(f"{SHARP} {ours}", world=stock_world * size),
        runner.stock(f"{SHARP} {stock}".strip(), world=stock_world),
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer",
        "--position-embedding-type learned_absolute --micro-batch-size 2",
        "--apply-query-key-layer-scaling --attention-softmax-in-fp32",
        "--num-query-groups 4 --kv-channels 24 --qk-layernorm",
    ],
)
def test_other_options_of_a_gpt(runner: Runner, flags: str) -> None:
    flags = f"{SHARP} {flags}"
    ours = runner.distflash(f"{flags} --context-parallel-size 2", world=2)
    assert_same(ours, runner.stock(flags))


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --moe-ffn-hidden-size 32 "
    "--moe-token-dispatcher-type allgather"
)


def test_mixture_of_experts(runner: Runner) -> None:
    ours = runner.distflash(f"{EXPERTS} --context-parallel-size 2", world=2)
    assert_same(ours, runner.stock(EXPERTS))


def test_expert_parallelism(runner: Runner) -> None:
    """Against data parallelism: expert parallelism starts from other weights than one rank."""
    flags = f"{EXPERTS} --expert-model-parallel-size 2"
    ours = runner.distflash(f"{flags} --context-parallel-size 2", world=2)
    assert_same(ours, runner.stock(flags, world=2))


# Schedule, loss normalisation and masked prompt tokens of 64. With 40 masked, rank 0 of two has
# none to learn from and rank 1 has 24.
UNEVEN = [
    ("balanced", "", 10),
    ("balanced", "", 40),
    ("balanced", "--calculate-per-token-loss", 10),
    ("zigzag", "", 40),
]


@pytest.mark.parametrize(("schedule", "flags", "prompt"), UNEVEN)
def test_loss_masks_that_are_uneven_over_ranks(
    runner: Runner, schedule: str, flags: str, prompt: int
) -> None:
    parallel = f"--context-parallel-size 2 --distflash-schedule {schedule}"
    ours = runner.distflash(f"{flags} {parallel}", world=2, prompt=prompt)
    assert_same(ours, runner.stock(flags, prompt=prompt))


@pytest.mark.parametrize(("schedule", "flags", "prompt"), [("balanced", "", 0), *UNEVEN[1:]])
def test_multi_token_prediction(runner: Runner, schedule: str, flags: str, prompt: int) -> None:
    flags = f"{flags} {SHARP} --mtp-num-layers 2 --mtp-loss-scaling-factor 1.0"
    parallel = f"--context-parallel-size 2 --distflash-schedule {schedule}"
    ours = runner.distflash(f"{flags} {parallel}", world=2, prompt=prompt)
    assert_same(ours, runner.stock(flags, prompt=prompt))


def test_forgotten_rope_is_noticed(runner: Runner) -> None:
    """Rotary tables cut for zigzag train without an error, on wrong positions."""
    flags = f"{SHARP} --context-parallel-size 2"
    stock = runner.stock(SHARP)
    assert_same(runner.distflash(flags, world=2), stock)
    forgotten = runner.distflash(flags, world=2, stock_rope=True)
    with pytest.raises(AssertionError):
        assert_same(forgotten, stock)


@pytest.mark.parametrize("checkpoint_format", ["torch", "torch_dist"])
def test_checkpoints_move_between_stock_and_distflash(
    runner: Runner, tmp_path: Path, checkpoint_format: str
) -> None:
    """Stock saves, DistFlash resumes on two ranks and saves, stock resumes."""
    whole = runner.stock("", iterations=6)
    flags = f"--ckpt-format {checkpoint_format} --save-interval 2 --save {tmp_path}"
    first = runner.stock(flags, iterations=2)
    flags += f" --load {tmp_path} --override-opt-param-scheduler"
    second = runner.distflash(f"{flags} --context-parallel-size 2", world=2, iterations=4)
    third = runner.stock(flags, iterations=6)
    assert_same([*first, *second, *third], whole)
