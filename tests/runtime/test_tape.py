"""Whole walks as one call into C++, on the host transport and with kernels that are C functions:
the same bits as the reference executor's, whatever the call's addresses."""

import random
from collections import defaultdict
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_distflash.plan import SCHEDULES, Mask, build, build_backward
from megatron_distflash.runtime import reference, tape
from megatron_distflash.runtime.flat import Shape
from megatron_distflash.runtime.hopper_kernel import TILES_PER_SHIFT
from megatron_distflash.runtime.native import NativeTransport
from megatron_distflash.runtime.state import empty_rows
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
            NativeTransport(communicator, plan, shape, CPU, late=(None, True, False)[seed % 3])
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


def one_rank(work) -> None:
    """work(problem, inputs, transports, library) of a problem that one rank has for itself."""
    problem = Problem(random.randrange(2**31), "ring", 1)
    shape = Shape(problem.batch, problem.head_dim, problem.dtype)
    communicator = native.Communicator.host(native.HostHub(1), 0, DEADLINE_S)
    transports = [NativeTransport(communicator, plan, shape, CPU) for plan in problem.plans]
    with library_on_the_cpu() as library:
        work(problem, problem.inputs()[0], transports, library)
    for transport in transports:
        transport.close(barrier=None)
    communicator.close(DEADLINE_S)


def test_a_tape_is_written_once_for_what_it_depends_on() -> None:
    def work(problem, inputs, transports, library) -> None:
        def tapes() -> list[int]:
            problem.run(tape, 0, inputs, transports)
            return [len(transport.tapes) for transport in transports]

        assert tapes() == [1, 1] and tapes() == [1, 1]
        inputs[1] = inputs[1].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        once = 1 if inputs[1].stride() == inputs[2].stride() else 2
        assert tapes() == [once, once]
        with mock.patch.dict(TILES_PER_SHIFT, forward=3):
            assert tapes() == [once + 1, once + 1]
        with mock.patch.object(tape, "MAX_TAPES", once + 1):
            torch.use_deterministic_algorithms(False)
            assert tapes() == [1, 1]  # none are kept beyond the bound

    one_rank(work)


def test_transfers_are_posted_behind_kernels_that_let_them_in() -> None:
    """And before all others. Who makes a transport may have it otherwise."""

    def work(problem, inputs, transports, library) -> None:
        *local, _ = inputs
        how = {"scale": 0.3, "transport": transports[0]}
        for kernel, is_late in (("cuda", True), ("cpu", False), ("cuda", True)):
            tape.forward(problem.plans[0], 0, *local, **how, kernel=kernel)
            assert transports[0].executor.is_late is is_late
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            tape.forward(problem.plans[0], 0, *local, **how, kernel="cpu")
        assert not transports[0].executor.is_late

    one_rank(work)
    communicator = native.Communicator.host(native.HostHub(1), 0, DEADLINE_S)
    problem = Problem(random.randrange(2**31), "ring", 1)
    shape = Shape(problem.batch, problem.head_dim, problem.dtype)
    for late in (True, False):
        transport = NativeTransport(communicator, problem.plans[0], shape, CPU, late=late)
        transport.expect(gives_way=not late)
        assert transport.executor.is_late is late
        transport.close(barrier=None)
    communicator.close(DEADLINE_S)


def test_who_wants_names_gets_the_walk() -> None:
    def work(problem, inputs, transports, library) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            problem.run(tape, 0, inputs, transports)
        assert any(event.name.startswith("distflash step 0") for event in seen.events())
        assert not transports[0].tapes

    one_rank(work)


def test_other_kernels_and_transports_walk() -> None:
    def work(problem, inputs, transports, library) -> None:
        *local, _ = inputs
        how = {"scale": 0.3, "transport": transports[0]}
        out, _ = tape.forward(problem.plans[0], 0, *local, **how, kernel="cpu")
        assert list(transports[0].tapes.values()) == [None] and "forward" not in library.names
        library.names.clear()
        how["transport"] = reference.NoTransport()
        ours, _ = tape.forward(problem.plans[0], 0, *local, **how, kernel="cuda")
        assert library.names == ["forward"]
        torch.testing.assert_close(ours, out, rtol=0.02, atol=0.02)

    one_rank(work)


def test_tensors_that_kernels_cannot_read_walk_too() -> None:
    """They begin between two multiples of 16 bytes, which no stride tells."""

    def work(problem, inputs, transports, library) -> None:
        *local, _ = inputs
        how = {"scale": 0.3, "kernel": "cuda", "transport": transports[0]}
        q = local[0].contiguous()
        wanted, _ = tape.forward(problem.plans[0], 0, q, *local[1:], **how)
        moved = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
        with mock.patch.object(reference, "forward", lambda *_, **__: "walked"):
            assert tape.forward(problem.plans[0], 0, q, *local[1:], **how) is not None
            assert tape.forward(problem.plans[0], 0, moved, *local[1:], **how) == "walked"
        assert torch.equal(tape.forward(problem.plans[0], 0, moved, *local[1:], **how)[0], wanted)

    one_rank(work)


def test_a_kernels_sentence_reaches_python() -> None:
    def work(problem, inputs, transports, library) -> None:
        *local, _ = inputs
        how = {"scale": 0.3, "kernel": "cuda", "transport": transports[0]}
        tape.forward(problem.plans[0], 0, *local, **how)
        library._kernels.forward_accumulate = None
        with pytest.raises(RuntimeError, match="distflash_forward: TypeError: 'NoneType'"):
            tape.forward(problem.plans[0], 0, *local, **how)
        held = transports[0]._held[0]
        assert any(x is local[0] for x in held)  # as long as the GPU may read it
        with pytest.raises(native.CommunicationError, match="out of step"):
            tape.forward(problem.plans[0], 0, *local, **how)
        assert transports[0]._held[0] is held

    one_rank(work)


@pytest.mark.timeout(60)
def test_a_dead_rank_ends_the_others() -> None:
    problem = Problem(random.randrange(2**31), "balanced", 3)
    inputs, hub = problem.inputs(), native.HostHub(3)
    shape = Shape(problem.batch, problem.head_dim, problem.dtype)

    def work(rank: int) -> None:
        communicator = native.Communicator.host(hub, rank, 0.4)
        transports = [NativeTransport(communicator, plan, shape, CPU) for plan in problem.plans]
        if rank == 2:
            raise KeyError("dead")
        problem.run(tape, rank, inputs[rank], transports)

    with library_on_the_cpu():
        *others, dead = on_threads(3, work)
    assert isinstance(dead, KeyError)
    for error in others:
        assert isinstance(error, native.CommunicationError), error
        assert "of the balanced forward plan" in str(error) or "was ended" in str(error)


def test_scratch_is_bounded_whatever_the_number_of_ranks() -> None:
    """By the walk's own lifetimes: what is sent is given up when its step is done."""
    sizes = []
    for num_ranks in (4, 8, 16):
        lengths = (32,) * num_ranks
        options = {"num_heads": 4, "num_kv_heads": 2, "mask": Mask.causal()}
        shape = Shape(1, 16, torch.bfloat16)
        most = []
        for make in (build, build_backward):
            plan = make("balanced", lengths, **options)
            for rank in (0, num_ranks - 1):
                hub = native.HostHub(num_ranks)
                communicator = native.Communicator.host(hub, rank, DEADLINE_S)
                transport = NativeTransport(communicator, plan, shape, CPU)
                q, dout, out = (torch.zeros(32, 1, 4, 16, dtype=shape.dtype) for _ in range(3))
                k, v = (torch.zeros(32, 1, 2, 16, dtype=shape.dtype) for _ in range(2))
                is_forward = make is build
                tensors = (q, k, v) if is_forward else (dout, q, k, v, out, empty_rows(q))
                module = reference.forward if is_forward else reference.backward

                def walk(tensors, over, module=module, plan=plan, rank=rank) -> tuple:
                    how = {"scale": 1.0, "kernel": "cuda", "transport": over}
                    return module(plan, rank, *tensors, **how)

                with library_on_the_cpu():
                    written = tape._write(walk, plan, tensors, transport)
                most.append(written.scratch_bytes)
                transport.close(barrier=None)
                communicator.close(DEADLINE_S)
        sizes.append(max(most))
    chunk_bytes = 32 * 4 * 16 * 2  # of queries
    assert sizes[0] <= sizes[1] <= sizes[2] <= 16 * chunk_bytes
    assert sizes[2] <= 1.3 * sizes[1]
