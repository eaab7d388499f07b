"""Whole walks as one call into C++, on the host transport and with kernels that are C functions:
the same bits as the reference executor's, whatever the call's addresses."""

import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from megatron_distflash.plan import SCHEDULES, Mask, build, build_backward
from megatron_distflash.runtime import reference, tape
from megatron_distflash.runtime.flat import Shape
from megatron_distflash.runtime.native import NativeTransport
from tests.runtime.fake_library import library_on_the_cpu
from tests.runtime.test_native import CPU, DEADLINE_S, QueueTransport, on_threads, queue, unwrap

native = pytest.importorskip(
    "megatron_distflash.runtime._native", reason="the native module is not built"
)

UNBALANCED = ("ring", "zigzag")


class Problem:
    """Random attention split at random, in 16 bits; ``inputs`` gives new ones in every turn."""

    def __init__(self, seed: int, schedule: str, num_ranks: int) -> None:
        rng = self.rng = random.Random(seed)
        self.kv_heads = rng.choice([1, 2, 4])
        self.heads = self.kv_heads * rng.choice([1, 2])
        self.batch, self.head_dim = rng.choice([1, 2]), rng.choice([8, 16])
        self.lengths = tuple(rng.randint(1, 9) * 2 for _ in range(num_ranks))
        self.dtype = rng.choice([torch.bfloat16, torch.float16])
        mask = Mask.causal()
        if schedule in UNBALANCED:
            mask = rng.choice([mask, Mask.full(), Mask(rng.randint(1, 12), 0)])
        options = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "mask": mask}
        options["prefetch"] = rng.choice([1, 2])
        makers = build, build_backward
        self.plans = tuple(make(schedule, self.lengths, **options) for make in makers)
        self.is_fused = rng.choice([True, False])
        self.generator = torch.Generator().manual_seed(seed)

    def inputs(self) -> list[list[Tensor]]:
        """By rank: q, k, v, dout; q, k and v may be parts of one tensor."""
        every = []
        for tokens in self.lengths:
            sizes = (self.heads, self.kv_heads, self.kv_heads)
            if self.is_fused:
                whole = self._random(tokens, sum(sizes))
                parts = whole.split(sizes, 2)
            else:
                parts = [self._random(tokens, size) for size in sizes]
            every.append([*parts, self._random(tokens, self.heads)])
        return every

    def _random(self, tokens: int, num_heads: int) -> Tensor:
        shape = (tokens, self.batch, num_heads, self.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def run(self, executor, rank: int, inputs: list[Tensor], transports) -> list[Tensor]:
        """out, lse, dq, dk, dv."""
        *local, dout = inputs
        how = {"scale": 0.3, "kernel": "cuda"}
        over = transports[0]
        out, lse = executor.forward(self.plans[0], rank, *local, **how, transport=over)
        given, over = (dout, *local, out, lse), transports[1]
        grads = executor.backward(self.plans[1], rank, *given, **how, transport=over)
        return [out, lse, *grads]


def run_reference(problem: Problem, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    queues = defaultdict(queue.Queue)
    num_ranks = len(inputs)
    for ends in ((source, target) for source in range(num_ranks) for target in range(num_ranks)):
        queues[ends] = queue.Queue()

    def work(rank: int) -> list[Tensor]:
        transport = QueueTransport(rank, queues)
        return problem.run(reference, rank, inputs[rank], (transport, transport))

    return unwrap(on_threads(num_ranks, work))


def run_tapes(problem: Problem, turns: list[list[list[Tensor]]], seed: int) -> list:
    """By rank: each turn's results, and the tapes."""
    num_ranks = len(problem.lengths)
    hub = native.HostHub(num_ranks, seed=seed, max_jitter_us=200)
    shape = Shape(problem.batch, problem.head_dim, problem.dtype)

    def work(rank: int):
        communicator = native.Communicator.host(hub, rank, DEADLINE_S)
        transports = [
            NativeTransport(communicator, plan, shape, CPU, late=seed % 2 == 0)
            for plan in problem.plans
        ]
        results = [problem.run(tape, rank, turn[rank], transports) for turn in turns]
        tapes = [list(transport.tapes.values()) for transport in transports]
        for transport in transports:
            transport.close(barrier=None)
        communicator.close(DEADLINE_S)
        return results, tapes

    return unwrap(on_threads(num_ranks, work))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_bits_as_the_reference(schedule: str, num_ranks: int) -> None:
    seed = random.randrange(2**31)
    problem = Problem(seed, schedule, num_ranks)
    turns = [problem.inputs() for _ in range(3)]
    with library_on_the_cpu():
        wanted = [run_reference(problem, inputs) for inputs in turns]
        by_rank = run_tapes(problem, turns, seed)
    for rank, (results, tapes) in enumerate(by_rank):
        where = f"seed {seed}, rank {rank}"
        assert [len(each) for each in tapes] == [1, 1], where
        for turn, ours in enumerate(results):
            for idx, (our, their) in enumerate(zip(ours, wanted[turn][rank], strict=True)):
                assert torch.equal(our, their), f"{where}, turn {turn}, tensor {idx}"
                assert our.stride() == their.stride(), where
        if schedule == "balanced":
            assert None not in [x for each in tapes for x in each], where
