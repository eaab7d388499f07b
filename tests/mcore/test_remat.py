"""Keeping attention's outputs through recomputation, in whole training runs on CPU ranks, fp32.

Recomputation changes no arithmetic, so everything here is compared bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_distflash.config import DistFlashConfig
from tests.mcore import harness
from tests.mcore.harness import TINY_GPT, Iteration, RankPool

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
NUM_MICRO_BATCHES = 4
ITERATIONS = 2
# Dropout everywhere but in attention; evaluation after every iteration.
TRAINING = [
    *TINY_GPT,
    *f"--num-layers {NUM_LAYERS} --hidden-dropout 0.1 --eval-interval 1 --eval-iters 1 "
    f"--distflash-attn --train-iters {ITERATIONS}".split(),
]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STOCK = "--no-distflash-remat"


class Run(NamedTuple):
    """What one rank saw of a training run."""

    records: list[Iteration]
    model: dict[str, str]  # A digest of every parameter and its last gradient.
    forwards: int  # How often attention's forward ran,
    backwards: int  # and its backward,
    sent_bytes: int  # and what their transfers sent.
    kept_peak_bytes: int
    kept_left_bytes: int  # After the last iteration.


class Watch:
    """Counts what attention does in this process."""

    def __init__(self) -> None:
        self.forwards = self.backwards = self.sent_bytes = 0
        self.kept_bytes = self.kept_peak_bytes = 0
        self.model: list[torch.nn.Module] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        from megatron.training import training

        from megatron_distflash.mcore import remat
        from megatron_distflash.runtime import attention, reference

        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in (
                (attention, "_attention", self._count_forward),
                (attention, "_attention_backward", self._count_backward),
                (reference.TorchTransport, "post", self._count_sends),
                (remat.KeptOutputs, "put", self._count_put),
                (remat.KeptOutputs, "take", self._count_take),
                (training, "setup_model_and_optimizer", self._hold_model),
            ):
                stock = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, wrapper(stock)))
            yield self

    def _count_forward(self, stock: Any) -> Any:
        def attention(*args: Any) -> Any:
            self.forwards += 1
            return stock(*args)

        return attention

    def _count_backward(self, stock: Any) -> Any:
        def attention_backward(*args: Any) -> Any:
            self.backwards += 1
            return stock(*args)

        return attention_backward

    def _count_sends(self, stock: Any) -> Any:
        def post(transport: Any, step_idx: int, sends: Any, receives: Any) -> None:
            self.sent_bytes += sum(t.nbytes for _, tensors in sends for t in tensors)
            stock(transport, step_idx, sends, receives)

        return post

    def _count_put(self, stock: Any) -> Any:
        def put(store: Any, kept: Any) -> None:
            self.kept_bytes += _storage_bytes(kept)
            self.kept_peak_bytes = max(self.kept_peak_bytes, self.kept_bytes)
            stock(store, kept)

        return put

    def _count_take(self, stock: Any) -> Any:
        def take(store: Any) -> Any:
            kept = stock(store)
            self.kept_bytes -= _storage_bytes(kept)
            return kept

        return take

    def _hold_model(self, stock: Any) -> Any:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            self.model = result[0]
            return result

        return setup_model_and_optimizer

    def report(self, records: list[Iteration]) -> Run:
        return Run(
            records,
            self._digests(),
            self.forwards,
            self.backwards,
            self.sent_bytes,
            self.kept_peak_bytes,
            self.kept_bytes,
        )

    def _digests(self) -> dict[str, str]:
        return {
            f"{chunk_idx}.{name}": hashlib.sha256(
                torch.stack([parameter.detach(), parameter.main_grad]).numpy().tobytes()
            ).hexdigest()
            for chunk_idx, chunk in enumerate(self.model)
            for name, parameter in chunk.named_parameters()
        }


def _storage_bytes(kept: Any) -> int:
    """What stays allocated because of it, the rest of a view's storage included."""
    return sum(x.untyped_storage().nbytes() for x in (kept.out, kept.lse))


@contextlib.contextmanager
def distflash_flags() -> Iterator[None]:
    from megatron_distflash.mcore.arguments import register_arguments, unregister_arguments
    from megatron_distflash.mcore.install import uninstall

    register_arguments()
    try:
        yield
    finally:
        uninstall()
        unregister_arguments()


def watched_train(rank: int, world: int, flags: str) -> Run:
    watch = Watch()
    with distflash_flags(), watch.watching():
        records = harness.train([*TRAINING, *flags.split()])
    return watch.report(records)


# ---- whole runs ---------------------------------------------------------------------------------

CP2 = "--context-parallel-size 2"
# 2 virtual stages of one layer on each of 2 pipeline stages.
INTERLEAVED = f"{CP2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SEQUENCE_PARALLEL = f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel"
NUM_EVALUATIONS = ITERATIONS + 2  # After each iteration, and of both sets at the end.


def layer_bytes(tokens: int, heads: int) -> int:
    """What is kept of one layer and micro-batch of TINY_GPT in fp32: out and LSE."""
    return 4 * tokens * heads * 16 + 4 * tokens * heads


@pytest.fixture(scope="module")
def train(rank_pool: RankPool) -> Any:
    """Runs on 2 or 4 ranks, each set of flags once: by rank, what every rank saw."""
    done: dict[str, list[Run]] = {}

    def run(flags: str, world: int) -> list[Run]:
        if flags not in done:
            done[flags] = rank_pool.run(watched_train, flags, world=world)
        return done[flags]

    return run


def assert_same_training(runs: list[Run], reference: list[Run]) -> None:
    assert runs[-1].records == reference[-1].records
    assert len(runs[-1].records) == ITERATIONS
    for mine, other in zip(runs, reference, strict=True):
        assert mine.model == other.model
        assert len(mine.model) > 0


@pytest.mark.parametrize(
    ("parallel", "world", "layers_per_rank"),
    [(CP2, 2, 4), (SEQUENCE_PARALLEL, 4, 4), (INTERLEAVED, 4, 2)],
    ids=["cp", "sequence-parallel", "interleaved"],
)
def test_attention_runs_once(train: Any, parallel: str, world: int, layers_per_rank: int) -> None:
    plain = train(parallel, world)
    stock = train(f"{parallel} {FULL} {STOCK}", world)
    ours = train(f"{parallel} {FULL}", world)
    assert_same_training(ours, plain)
    assert_same_training(ours, stock)
    calls = layers_per_rank * NUM_MICRO_BATCHES
    in_training, in_evaluation = calls * ITERATIONS, calls * NUM_EVALUATIONS
    for a, b, c in zip(ours, plain, stock, strict=True):
        assert a.forwards == b.forwards == in_training + in_evaluation
        assert c.forwards == 2 * in_training + in_evaluation
        assert a.backwards == b.backwards == c.backwards == in_training
        # Recomputation sends nothing; stock sends the forward's transfers once more.
        assert a.sent_bytes == b.sent_bytes < c.sent_bytes
        assert a.kept_left_bytes == 0
        assert b.kept_peak_bytes == c.kept_peak_bytes == 0


def test_peak_of_kept_outputs(train: Any) -> None:
    """Without pipelining one micro-batch is in flight. Interleaved, stage p of P with V virtual
    stages warms up with 2 (P - p - 1) + (V - 1) P forward passes and does one more before the first
    backward (Megatron-LM, arXiv 2104.04473, figure 4)."""
    for run in train(f"{CP2} {FULL}", 2):
        assert run.kept_peak_bytes == NUM_LAYERS * layer_bytes(tokens=32, heads=4)
    for run in train(f"{SEQUENCE_PARALLEL} {FULL}", 4):
        assert run.kept_peak_bytes == NUM_LAYERS * layer_bytes(tokens=32, heads=2)
    for rank, run in enumerate(train(f"{INTERLEAVED} {FULL}", 4)):
        stage = rank // 2
        in_flight = 2 * (2 - stage - 1) + (2 - 1) * 2 + 1
        assert run.kept_peak_bytes == in_flight * layer_bytes(tokens=32, heads=4)


@pytest.mark.parametrize(
    ("recompute", "layers_kept"),
    [("uniform --recompute-num-layers 3", 4), ("block --recompute-num-layers 3", 3)],
)
def test_methods(train: Any, recompute: str, layers_kept: int) -> None:
    plain = train(CP2, 2)
    ours = train(f"{CP2} --recompute-granularity full --recompute-method {recompute}", 2)
    assert_same_training(ours, plain)
    for a, b in zip(ours, plain, strict=True):
        assert (a.forwards, a.sent_bytes) == (b.forwards, b.sent_bytes)
        assert a.kept_peak_bytes == layers_kept * layer_bytes(tokens=32, heads=4)
        assert a.kept_left_bytes == 0


def test_distributed_saved_activations(train: Any) -> None:
    parallel = "--tensor-model-parallel-size 2 --distribute-saved-activations"
    stock = train(f"{parallel} {FULL} {STOCK}", 2)
    ours = train(f"{parallel} {FULL}", 2)
    assert_same_training(ours, stock)
    calls = NUM_LAYERS * NUM_MICRO_BATCHES
    assert [run.forwards for run in ours] == [calls * (ITERATIONS + NUM_EVALUATIONS)] * 2


def test_other_modules_recompute(train: Any) -> None:
    """Selective recomputation of modules without attention is stock's, and keeps nothing.

    (Without Transformer Engine stock Megatron cannot recompute the others.)
    """
    plain = train(CP2, 2)
    ours = train(f"{CP2} --recompute-granularity selective --recompute-modules mlp", 2)
    assert_same_training(ours, plain)
    for a, b in zip(ours, plain, strict=True):
        assert (a.forwards, a.sent_bytes, a.kept_peak_bytes) == (b.forwards, b.sent_bytes, 0)


def peak_bytes(profile: Any) -> int:
    """The most bytes held at once of what was allocated under the profiler.

    It also reports blocks that are freed under it, with whatever size their address once had.
    """
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    changes = []
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    held: dict[int, int] = {}
    total = peak = 0
    for _, address, nbytes in sorted(changes):
        if nbytes > 0:
            held[address] = nbytes
            total += nbytes
        else:
            total -= held.pop(address, 0)
        peak = max(peak, total)
    return peak


def peak_of_an_iteration(rank: int, world: int, flags: str) -> int:
    """The most bytes that torch held at once in the second iteration, above what it began with."""
    from megatron.training import training

    stock_step, peaks = training.train_step, []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        gc.disable()  # What earlier cases left must not be freed, and counted, in between.
        try:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            ) as profile:
                result = stock_step(*args, **kwargs)
        finally:
            gc.enable()
        peaks.append(peak_bytes(profile))
        return result

    with distflash_flags(), mock.patch.object(training, "train_step", train_step):
        harness.train([*TRAINING, *flags.split()])
    return peaks[1]


def test_peak_memory_is_stock_plus_what_is_kept(rank_pool: RankPool) -> None:
    """Where memory peaks, at the start of the backward pass, all layers' outputs are kept; the
    layer that is recomputed just then may hold its own in stock, too. A tenth of a layer is for
    small tensors that some runs free a little later (2 kB of 140 were seen)."""
    flags = f"{FULL} --seq-length 512 --max-position-embeddings 512"
    (stock,) = rank_pool.run(peak_of_an_iteration, f"{flags} {STOCK}", world=1)
    (ours,) = rank_pool.run(peak_of_an_iteration, flags, world=1)
    layers = (ours - stock) / layer_bytes(tokens=512, heads=4)
    assert NUM_LAYERS - 1.1 <= layers <= NUM_LAYERS + 0.1


# ---- failing iterations -------------------------------------------------------------------------


class BrokenLayer(Exception):
    """Stands for whatever fails in the middle of an iteration."""


def train_with_failure(rank: int, world: int, flags: str, failing_call: int) -> tuple[Run, int]:
    """The first iteration fails in its ``failing_call``-th core attention; then training goes on.

    Returns what happened, and how many regions outlived the failing iteration.
    """
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
    from megatron.training import training

    from megatron_distflash.mcore import remat
    from megatron_distflash.mcore.core_attention import DistFlashCoreAttention

    watch, calls, regions_left = Watch(), 0, -1
    stock_step, stock_forward = training.train_step, DistFlashCoreAttention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            raise BrokenLayer
        return stock_forward(*args, **kwargs)

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal regions_left
        if regions_left < 0:
            with contextlib.suppress(BrokenLayer):
                stock_step(*args, **kwargs)
            gc.collect()
            regions_left = count_regions()
            watch.kept_bytes = 0  # What the failure dropped was never taken.
            assert remat._running.get() is None
            get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET  # Stock has no way back.
        return stock_step(*args, **kwargs)

    with (
        distflash_flags(),
        watch.watching(),
        mock.patch.object(training, "train_step", train_step),
        mock.patch.object(DistFlashCoreAttention, "forward", forward),
    ):
        # There is data for one iteration more.
        more = f"--train-iters {ITERATIONS + 1} --exit-interval {ITERATIONS}".split()
        records = harness.train([*TRAINING, *flags.split(), *more])
    return watch.report(records), regions_left


@pytest.mark.parametrize("failing_call", [11, 14], ids=["first-pass", "recomputation"])
def test_failing_iteration_leaves_nothing(rank_pool: RankPool, failing_call: int) -> None:
    """Core attention is called for the first passes of the layers of a micro-batch, then for their
    recomputations, so the second micro-batch's are calls 9-12 and 13-16."""
    args = (f"{CP2} {FULL} {STOCK}", failing_call)
    stock = rank_pool.run(train_with_failure, *args, world=2)
    args = (f"{CP2} {FULL}", failing_call)
    ours = rank_pool.run(train_with_failure, *args, world=2)
    assert_same_training([run for run, _ in ours], [run for run, _ in stock])
    for run, regions_left in ours:
        assert regions_left == 0
        assert run.kept_left_bytes == 0


# ---- one region after the other, called directly -------------------------------------------------


def toy_layer(name: str) -> Any:
    """x [n, b, h·d] -> [n, b, h·d]: dropout, attention of x to itself, a residual."""
    from megatron_distflash.mcore.remat import attend

    def layer(x: torch.Tensor) -> torch.Tensor:
        q = torch.nn.functional.dropout(x, 0.3).unflatten(-1, (4, -1))
        k, v = (torch.tanh(q[:, :, :2] * factor) for factor in (2.0, 3.0))
        return x + attend(q, k, v, caller=name).flatten(2)

    return layer


def keeping_checkpoint(new_store: Any = None) -> Any:
    """Megatron's checkpoint function with regions, as function(layer, x)."""
    from megatron.core.tensor_parallel import random

    from megatron_distflash.mcore import remat

    checkpoint = remat.with_regions(random.checkpoint, new_store or remat.KeptOutputs)
    return lambda function, x: checkpoint(function, False, x)


def gradients_of(layers: list[Any], num_micro_batches: int, run: Any) -> list[torch.Tensor]:
    """Forward passes of all micro-batches, then their backward passes in the same order."""
    torch.manual_seed(7)
    inputs = [torch.randn(6, 2, 32, requires_grad=True) for _ in range(num_micro_batches)]
    outputs = []
    for x in inputs:
        for layer in layers:
            x = run(layer, x)
        outputs.append(x)
    for x in outputs:
        x.sum().backward()
    return [x.grad for x in inputs]


def plainly(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def nested_regions(rank: int, world: int) -> tuple[int, int]:
    """A region within a region: (attention forwards without recomputation, with both)."""
    with harness.model_parallel():
        checkpoint = keeping_checkpoint()
        layers = [toy_layer("a"), toy_layer("b"), toy_layer("c")]

        def middle(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(layers[1], x)

        def all_three(x: torch.Tensor) -> torch.Tensor:
            return layers[2](middle(layers[0](x)))

        plain, nested = Watch(), Watch()
        with plain.watching():
            expected = gradients_of(layers, 2, plainly)
        with nested.watching():
            got = gradients_of([all_three], 2, checkpoint)
        assert nested.kept_bytes == 0
        assert all(map(torch.equal, got, expected))
        return plain.forwards, nested.forwards


def test_nested_regions(rank_pool: RankPool) -> None:
    assert rank_pool.run(nested_regions, world=1) == [(6, 6)]


def evaluation_and_dropped_graphs(rank: int, world: int) -> None:
    with harness.model_parallel():
        checkpoint, layer = keeping_checkpoint(), toy_layer("a")
        watch = Watch()
        x = torch.randn(6, 2, 32, requires_grad=True)
        with watch.watching():
            with torch.no_grad():
                checkpoint(layer, x)
            assert watch.kept_peak_bytes == 0
            checkpoint(layer, x.detach())  # No graph, so its region is gone at once.
            y = checkpoint(layer, x)
            assert count_regions() == 1
            del y
        assert count_regions() == 0


def count_regions() -> int:
    from megatron_distflash.mcore.remat import Region

    return sum(type(x) is Region for x in gc.get_objects())


def test_regions_live_as_long_as_their_graph(rank_pool: RankPool) -> None:
    rank_pool.run(evaluation_and_dropped_graphs, world=1)


def recompute_differently(rank: int, world: int) -> list[str]:
    """Messages of recomputations that do not repeat their first pass."""
    messages = []
    with harness.model_parallel():
        checkpoint = keeping_checkpoint()
        a, b = toy_layer("a"), toy_layer("b")
        x = torch.randn(6, 2, 32, requires_grad=True)
        y = checkpoint(a, x).sum()
        y.backward(retain_graph=True)
        for run, first, then in ((y, None, None), (None, (a, b), (b, a)), (None, (a, b), (a,))):
            passes = iter((first, then))

            def function(z: torch.Tensor, passes: Any = passes) -> torch.Tensor:
                for layer in next(passes):
                    z = layer(z)
                return z

            loss = run if first is None else checkpoint(function, x).sum()
            with pytest.raises(RuntimeError) as caught:
                loss.backward()
            messages.append(str(caught.value))
        assert count_regions() <= 3
    return messages


def test_a_different_recomputation_is_an_error(rank_pool: RankPool) -> None:
    (messages,) = rank_pool.run(recompute_differently, world=1)
    for message, how in zip(messages, ("more often", "another order", "less often"), strict=True):
        assert how in message
        assert "pass --no-distflash-remat" in message


def offloaded(rank: int, world: int) -> tuple[int, int]:
    """The host shelf on stand-ins for streams: (outputs that left, outputs that came back)."""
    from megatron_distflash.mcore import kept

    shelf = kept.HostShelf()
    layers = [toy_layer(name) for name in "abcde"]
    with harness.model_parallel():
        expected = gradients_of(layers, 2, plainly)
        left, back = kept._Parcel.leave, kept._Parcel.fetch
        num_left = num_back = 0

        def leave(*args: Any) -> None:
            nonlocal num_left
            num_left += 1
            left(*args)

        def fetch(*args: Any) -> bool:
            nonlocal num_back
            fetched = back(*args)
            num_back += fetched
            return fetched

        with mock.patch.multiple(kept._Parcel, leave=leave, fetch=fetch):
            got = gradients_of(layers, 2, keeping_checkpoint(shelf.new_store))
    assert all(map(torch.equal, got, expected))
    assert count_regions() == 0
    assert not shelf._arriving
    return num_left, num_back


def test_offloaded_outputs_come_back(rank_pool: RankPool) -> None:
    """Of 10 outputs the last never leaves, and the one before is still there when it is needed."""
    assert rank_pool.run(offloaded, world=1) == [(9, 8)]


# ---- refusals -----------------------------------------------------------------------------------


def config_with(**settings: Any) -> Any:
    return mock.Mock(spec_set=[*settings], **settings)


@pytest.mark.parametrize(
    ("options", "settings", "instead"),
    [
        ({}, {"recompute_granularity": "selective"}, "name other --recompute-modules"),
        (
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
            "name other --recompute-modules",
        ),
        ({"offload": True}, {}, "add --recompute-granularity full"),
        ({}, {"deterministic_mode": True}, "call torch.use_deterministic_algorithms"),
    ],
)
def test_refusals(options: Any, settings: Any, instead: str) -> None:
    from megatron_distflash.mcore.support import check_transformer_config

    with pytest.raises(ValueError, match=instead):
        check_transformer_config(config_with(**settings), DistFlashConfig(**options))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"remat": False}, {"recompute_granularity": "selective"}),
        ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        ({}, {"recompute_granularity": "full", "recompute_modules": ["core_attn"]}),
        ({}, {"recompute_granularity": None, "recompute_modules": ["core_attn"]}),
        ({"offload": True}, {"recompute_granularity": "full"}),
    ],
)
def test_what_is_not_refused(options: Any, settings: Any) -> None:
    from megatron_distflash.mcore.support import check_transformer_config

    check_transformer_config(config_with(**settings), DistFlashConfig(**options))


def test_offload_needs_remat_and_a_gpu() -> None:
    from megatron_distflash.mcore.patching import Patches
    from megatron_distflash.mcore.remat import keep_outputs

    with pytest.raises(ValueError, match="leave one of them out"):
        DistFlashConfig(remat=False, offload=True)
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        pytest.raises(ValueError, match="torch sees no GPU"),
    ):
        keep_outputs(Patches(), DistFlashConfig(offload=True))


def installed_checkpoints(rank: int, world: int) -> None:
    """Both checkpoint functions are replaced wherever they are imported, and given back."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import random

    from megatron_distflash.mcore import remat
    from megatron_distflash.mcore.patching import Patches

    def found() -> list[Any]:
        return [random.checkpoint, tensor_parallel.checkpoint, transformer_engine.te_checkpoint]

    stock, patches = found(), Patches()
    remat.keep_outputs(patches, DistFlashConfig(remat=False))
    assert found() == stock
    with mock.patch.object(transformer_engine, "HAVE_TE", True):
        remat.keep_outputs(patches, DistFlashConfig())
    ours = found()
    patches.undo()
    assert found() == stock
    assert [function.__wrapped__ for function in ours] == stock


def test_both_checkpoint_functions_keep_outputs(rank_pool: RankPool) -> None:
    rank_pool.run(installed_checkpoints, world=1)
