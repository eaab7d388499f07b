"""CPU ranks: Megatron's parallelism, checkpoints, dropout and recomputation without a GPU.

Fresh seeds each session; a failing assertion names the one it used. Losses of different parallel
sizes agree to 1e-5: fp32 sums in another order differ by 1e-6 of a loss near 5.5 in these runs.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_distflash.mcore.cpu.arguments import CPU_DEFAULTS, check_cpu_args
from tests.mcore import harness
from tests.mcore.harness import TINY_GPT, Iteration, RankPool

pytestmark = pytest.mark.slow

SEED = random.SystemRandom().randrange(1, 1_000_000)
# Gradients are clipped in every iteration: their norm starts near 0.9.
ARGS = [*TINY_GPT, "--seed", str(SEED), "--num-layers", "4", "--clip-grad", "0.1"]
DROPOUT = shlex.split("--hidden-dropout 0.1 --attention-dropout 0.1")
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
STOP, END = 2, 4  # Runs that resume stop after iteration STOP; all runs end with iteration END.


def assert_close(run: list[Iteration], reference: list[Iteration], tolerance: float = 1e-5) -> None:
    """Losses to ``tolerance``, grad norms to as much relatively."""
    assert len(run) == len(reference), f"seed {SEED}: {run} against {reference}"
    for got, want in zip(run, reference, strict=True):
        assert abs(got.loss - want.loss) <= tolerance, f"seed {SEED}: {run} against {reference}"
        difference = abs(got.grad_norm - want.grad_norm)
        assert difference <= tolerance * want.grad_norm, f"seed {SEED}: {run} against {reference}"


class Trainer:
    """Trains each configuration once, in pool ranks, and keeps the record."""

    def __init__(self, pool: RankPool, directory: Path) -> None:
        self.pool = pool
        self.directory = directory
        self._records: dict[tuple[str, int], list[Iteration]] = {}

    def train(self, flags: str = "", *, world: int = 1) -> list[Iteration]:
        if (flags, world) not in self._records:
            args = [*ARGS, *shlex.split(flags)]
            self._records[flags, world] = self.pool.train(args, END, world=world)
        return self._records[flags, world]

    def saved(self, name: str, flags: str = "", *, world: int = 1) -> str:
        """The flag that loads the checkpoint which such a run saves when it stops at STOP."""
        path = self.directory / name
        if not path.exists():
            stop = f" --save {path} --save-interval {STOP} --exit-interval {STOP}"
            assert len(self.train(flags + stop, world=world)) == STOP
        return f" --load {path}"


@pytest.fixture(scope="module")
def trainer(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(rank_pool, tmp_path_factory.mktemp("checkpoints"))


# ---- parallel sizes and checkpoints -------------------------------------------------------------


def test_loss_falls(trainer: Trainer) -> None:
    losses = [iteration.loss for iteration in trainer.train()]
    assert losses[-1] < losses[0] - 0.02, f"seed {SEED}: {losses}"


@pytest.mark.parametrize(
    ("flags", "world"),
    [
        ("", 1),
        ("", 2),
        (TP2, 2),
        (f"{TP2} --sequence-parallel", 2),
        (PP2, 2),
        (f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2),
        (f"{TP2} --sequence-parallel {PP2}", 4),
    ],
)
def test_resuming_one_rank_in_other_parallel_sizes(
    trainer: Trainer, flags: str, world: int
) -> None:
    """A one-rank run goes on in another layout as if it had never stopped. (From scratch, pipeline
    stages would start from other weights than one rank does: Megatron seeds each stage.)"""
    resumed = trainer.train(flags + trainer.saved("one-rank"), world=world)
    assert_close(resumed, trainer.train()[STOP:])


@pytest.mark.parametrize("overlap", ["", " --overlap-grad-reduce --overlap-param-gather"])
def test_distributed_optimizer(trainer: Trainer, overlap: str) -> None:
    run = trainer.train(f"--use-distributed-optimizer{overlap}", world=2)
    assert_close(run, trainer.train())


@pytest.mark.parametrize(("flags", "world"), [(TP2, 4), (PP2, 2), ("", 1)])
def test_resuming_a_distributed_optimizer(trainer: Trainer, flags: str, world: int) -> None:
    """Torch's AdamW goes on counting steps where it stopped, also in another layout."""
    sharded = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    load = trainer.saved("sharded", sharded + TP2, world=4)
    assert_close(trainer.train(sharded + flags + load, world=world), trainer.train()[STOP:])


def test_resuming_a_distributed_optimizer_by_buckets(trainer: Trainer) -> None:
    """The default checkpoint of the distributed optimizer, which keeps its layout."""
    flags = "--use-distributed-optimizer"
    load = trainer.saved("buckets", flags, world=2)
    assert_close(trainer.train(flags + load, world=2), trainer.train()[STOP:])


def test_torch_checkpoint_format(trainer: Trainer) -> None:
    flags = f"{TP2} --ckpt-format torch"
    load = trainer.saved("torch-format", flags, world=2)
    assert_close(trainer.train(flags + load, world=2), trainer.train()[STOP:])


def test_bf16(trainer: Trainer) -> None:
    """A parallel bf16 run stays as near to fp32 as bf16's 8 bits allow (a loss near 5.5)."""
    flags = f"--bf16 --use-distributed-optimizer --sequence-parallel {TP2}"
    assert_close(trainer.train(flags, world=4), trainer.train(), tolerance=2**-8 * 5.5)


def test_expert_parallel_dispatchers_agree(trainer: Trainer) -> None:
    """Tokens sent by all-to-all or gathered by all: the same experts see them."""
    experts = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
    all_to_all = trainer.train(f"{experts} --moe-token-dispatcher-type alltoall", world=2)
    gather = trainer.train(f"{experts} --moe-token-dispatcher-type allgather", world=2)
    assert_close(all_to_all, gather)


def sum_over_context_group(rank: int, world: int) -> tuple[int, float]:
    from megatron.core import parallel_state

    with harness.model_parallel(tensor_model_parallel_size=2, context_parallel_size=2):
        value = torch.tensor(float(rank), device="cuda")
        torch.distributed.all_reduce(value, group=parallel_state.get_context_parallel_group())
        return parallel_state.get_context_parallel_world_size(), value.item()


def test_context_parallel_groups(rank_pool: RankPool) -> None:
    """Stock attention cannot use them without Transformer Engine, but they must exist."""
    sums = rank_pool.run(sum_over_context_group, world=4)
    assert sums == [(2, 2.0), (2, 4.0), (2, 2.0), (2, 4.0)]  # Ranks 0 and 2, ranks 1 and 3.


# ---- evaluation ---------------------------------------------------------------------------------


def train_watching_evaluation(rank: int, world: int, args: list[str]) -> tuple[list, list[float]]:
    from megatron.training import training

    stock = training.evaluate
    losses: list[float] = []

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        losses.append(float(result[0]["lm loss"]))
        return result

    with mock.patch.object(training, "evaluate", evaluate):
        return harness.train(args), losses


def test_evaluation(trainer: Trainer) -> None:
    """It reports a loss of its own and leaves training alone, random numbers included."""
    plain = trainer.train(shlex.join(DROPOUT), world=2)
    flags = ["--eval-iters", "1", "--eval-interval", "2", "--train-iters", str(END)]
    args = [*ARGS, *DROPOUT, *flags]
    run, losses = trainer.pool.run(train_watching_evaluation, args, world=2)[-1]
    assert run == plain, f"seed {SEED}"
    assert len(losses) == END // 2 + 2  # Every second iteration; both sets at the end.
    assert all(4.0 < loss < 7.0 for loss in losses), losses


# ---- random numbers -----------------------------------------------------------------------------


def test_hidden_dropout_is_the_same_on_all_tensor_ranks(trainer: Trainer) -> None:
    """Their copies of the hidden states must lose the same elements, as on one rank; only one of
    them has a data loader, which draws random numbers too."""
    dropout = "--hidden-dropout 0.2"
    assert_close(trainer.train(f"{dropout} {TP2}", world=2), trainer.train(dropout))


def test_resuming_restores_random_numbers(trainer: Trainer) -> None:
    flags = f"{shlex.join(DROPOUT)} {TP2}"
    load = trainer.saved("dropout", flags, world=2)
    assert trainer.train(flags + load, world=2) == trainer.train(flags, world=2)[STOP:]


def draw_from_tracker(rank: int, world: int, seed: int) -> dict[str, list[float]]:
    """Draws by name: in forks of the tracker's states, and around them from the default state."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with harness.model_parallel(seed=seed, tensor_model_parallel_size=2):
        tracker = get_cuda_rng_tracker()
        draws: dict[str, list[float]] = {"default": [torch.rand((), device="cuda").item()]}
        with tracker.fork():
            draws["model"] = [torch.rand(()).item()]
            with tracker.fork("data-parallel-rng"):
                draws["data"] = [torch.rand(()).item()]
            draws["model"].append(torch.rand(()).item())
        draws["default"].append(torch.rand(()).item())
        saved = tracker.get_states()
        for _ in range(2):
            tracker.set_states(dict(saved))
            with tracker.fork():
                draws["model"].append(torch.rand(()).item())
        return draws


def test_tracker_forks_as_on_a_gpu(rank_pool: RankPool) -> None:
    """Tensor ranks share the default state and have a model-parallel state each; a state goes on
    where its last fork left it, and can be put back."""

    def stream(seed: int, count: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand((), generator=generator).item() for _ in range(count)]

    for rank, draws in enumerate(rank_pool.run(draw_from_tracker, SEED, world=2)):
        model = stream(SEED + 2718 + rank, 3)
        assert draws["default"] == stream(SEED, 2)
        assert draws["data"] == stream(SEED, 1)
        assert draws["model"] == [*model, model[2]]


def load_gpu_state(rank: int, world: int) -> str:
    try:
        torch.cuda.set_rng_state(torch.zeros(16, dtype=torch.uint8))  # The size of a GPU's state.
    except ValueError as error:
        return str(error)
    return ""


def test_random_state_of_a_gpu_is_refused(rank_pool: RankPool) -> None:
    assert "--no-load-rng" in rank_pool.run(load_gpu_state, world=1)[0]


# ---- recomputation ------------------------------------------------------------------------------

RECOMPUTE = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "block": {"recompute_granularity": "full", "recompute_method": "block"},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "distributed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "distribute_saved_activations": True,
    },
}


def gradients(recompute: dict[str, Any], tokens: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Gradients of a two-layer GPT with dropout for [b, s] tokens, tensor parallel over 2 ranks."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    with harness.model_parallel(seed=seed, tensor_model_parallel_size=2):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=2,
            hidden_dropout=0.2,
            attention_dropout=0.2,
            use_cpu_initialization=True,
            add_bias_linear=False,  # Megatron recomputes an MLP with a bias without end.
            recompute_num_layers=1 if recompute.get("recompute_method") else None,
            **recompute,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=64)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()
        return [parameter.grad for parameter in model.parameters()]


def compare_gradients(rank: int, world: int, seed: int) -> dict[str, bool]:
    """By way of recomputing: whether all gradients are bit-identical to those without."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
    plain = gradients({}, tokens, seed)
    assert any(gradient.abs().max() > 0 for gradient in plain)
    assert not all(map(torch.equal, plain, gradients({}, tokens, seed + 1)))
    return {
        name: all(map(torch.equal, plain, gradients(recompute, tokens, seed)))
        for name, recompute in RECOMPUTE.items()
    }


def test_recomputation_gives_identical_gradients(rank_pool: RankPool) -> None:
    for same in rank_pool.run(compare_gradients, SEED, world=2):
        assert same == dict.fromkeys(RECOMPUTE, True), f"seed {SEED}"


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_training_with_recomputation(trainer: Trainer, method: str) -> None:
    flags = f"{shlex.join(DROPOUT)} {TP2}"
    recompute = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1"
    assert trainer.train(f"{flags} {recompute}", world=2) == trainer.train(flags, world=2)


# ---- arguments ----------------------------------------------------------------------------------


def parse(rank: int, world: int, argv: list[str]) -> dict[str, Any] | str:
    """What Megatron makes of a command line: the arguments, or the ValueError's text."""
    from megatron.training.arguments import parse_and_validate_args

    with mock.patch.object(sys, "argv", ["script.py", *argv]):
        try:
            args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        except ValueError as error:
            return str(error)
    return {dest: getattr(args, dest) for dest in CPU_DEFAULTS}


def test_defaults_reach_megatron(rank_pool: RankPool) -> None:
    argv = [*TINY_GPT, "--train-iters", "1"]
    assert rank_pool.run(parse, argv, world=1) == [CPU_DEFAULTS]


def test_explicit_flags_win_over_defaults(rank_pool: RankPool) -> None:
    argv = [*TINY_GPT, "--train-iters", "1", "--num-workers", "3"]
    assert rank_pool.run(parse, argv, world=1) == [CPU_DEFAULTS | {"num_workers": 3}]


def test_megatron_refuses_transformer_engine(rank_pool: RankPool) -> None:
    argv = [*TINY_GPT, "--train-iters", "1", "--transformer-impl", "transformer_engine"]
    message = rank_pool.run(parse, argv, world=1)[0]
    assert message.startswith("--transformer-impl transformer_engine cannot run on CPU ranks")


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"distributed_backend": "nccl"}, "--distributed-backend nccl"),
        ({"fp8": "hybrid"}, "--fp8-format hybrid"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"async_save": True}, "--async-save"),
        ({"attention_backend": SimpleNamespace(name="flash")}, "--attention-backend flash"),
        ({"recompute_modules": ["mlp", "layernorm"]}, "--recompute-modules layernorm"),
        ({"profile": True, "use_pytorch_profiler": False}, "--profile"),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match="cannot run on CPU ranks") as caught:
        check_cpu_args(argparse.Namespace(**setting))
    message = str(caught.value)
    assert message.startswith(flag)
    assert message.endswith(".")
    assert "\n" not in message


def test_possible_settings_pass() -> None:
    profile = {"profile": True, "use_pytorch_profiler": True}
    check_cpu_args(argparse.Namespace(**CPU_DEFAULTS, **profile, recompute_modules=["mlp"]))


# ---- the device ---------------------------------------------------------------------------------


def use_device(rank: int, world: int) -> None:
    """The ways in which Megatron names its device and that they end on the CPU."""
    x = torch.rand(3, 4, device="cuda", pin_memory=True)
    places = [
        torch.empty(2, device=torch.cuda.current_device()),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.zeros_like(x, device="cuda:0"),
        x.new_empty(2, device="cuda"),
        x.to("cuda", torch.float64),
        x.to(device="cuda", non_blocking=True),
        x.to(x.double()),
        torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
    ]
    assert {place.device.type for place in places} == {"cpu"}
    assert x.cuda(non_blocking=True) is x
    assert x.to("meta").device.type == "meta"
    assert x.to(torch.float64).dtype == torch.float64
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert x.type(torch.cuda.HalfTensor).dtype == torch.float16
    assert x.type(torch.int32).dtype == torch.int32


def use_streams(rank: int, world: int) -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        torch.cuda.current_stream().wait_event(start)
        torch.rand(64, 64).mm(torch.rand(64, 64)).record_stream(torch.cuda.current_stream())
        end.record(torch.cuda.current_stream())
    end.synchronize()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert isinstance(torch.cuda.Stream | None, object)  # Classes, not functions: annotations.
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


class PlaceInBackward(torch.autograd.Function):
    """Makes a tensor on "the GPU" in its backward function, as sequence parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty(grad.shape, device="cuda").copy_(grad)


def place_in_nested_backward(rank: int, world: int) -> None:
    from megatron.core.tensor_parallel import checkpoint

    x = torch.rand(4, requires_grad=True)
    with harness.model_parallel():
        checkpoint(lambda y: PlaceInBackward.apply(y) * 2, False, x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))


def enable_again(rank: int, world: int) -> None:
    from megatron_distflash.mcore import cpu

    before = (torch.cuda.current_device, torch.cuda.random._lazy_call)
    cpu.enable()
    assert (torch.cuda.current_device, torch.cuda.random._lazy_call) == before
    assert cpu.needed()  # torch.cuda.is_available() still tells the truth.


@pytest.mark.parametrize(
    "case",
    [use_device, use_streams, place_in_nested_backward, enable_again],
    ids=lambda c: c.__name__,
)
def test_device(rank_pool: RankPool, case: Any) -> None:
    rank_pool.run(case, world=1)


def test_importing_changes_nothing() -> None:
    code = (
        "import sys, torch; before = dict(vars(torch.cuda)); import megatron_distflash.mcore.cpu; "
        "assert dict(vars(torch.cuda)) == before; assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- unmodified scripts -------------------------------------------------------------------------


@pytest.mark.parametrize("checkout", os.environ.get("MEGATRON_LM", "").split(":"))
def test_unmodified_pretrain_gpt(checkout: str, tmp_path: Path) -> None:
    """pretrain_gpt.py of the Megatron-LM checkouts in $MEGATRON_LM (paths with : between)."""
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout")
    argv = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        *["-m", "megatron_distflash.run", f"{checkout}/pretrain_gpt.py", *ARGS, *TP2.split()],
        *["--mock-data", "--train-iters", "3", "--log-interval", "1"],
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("lm loss:") == 3, result.stdout[-3000:]
