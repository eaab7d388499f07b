"""The native executor on the host transport, with ranks as threads of this process."""

import itertools
import queue
import random
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_distflash.plan import SCHEDULES, Mask, Plan, build, build_backward
from megatron_distflash.runtime import native as native_layer
from megatron_distflash.runtime import reference
from megatron_distflash.runtime.flat import Shape, flatten, place_slots
from megatron_distflash.runtime.native import MAX_PLANS, NativeExecutor, NativeTransport

native = pytest.importorskip(
    "megatron_distflash.runtime._native", reason="the native module is not built"
)

CPU = torch.device("cpu")
DEADLINE_S = 60.0


class QueueTransport:
    """The plainest transport there is, to compare with: a queue per ordered pair of ranks."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue]) -> None:
        self._rank, self._queues = rank, queues
        self._receives: list = []

    def targets(self, transfer, wires, device) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype) for wire in wires]

    def post(self, step_idx, sends, receives) -> None:
        for transfer, tensors in sends:
            copies = [tensor.clone() for tensor in tensors]
            self._queues[self._rank, transfer.target].put(copies)
        self._receives = receives

    def wait(self) -> None:
        for transfer, tensors in self._receives:
            sent = self._queues[transfer.source, self._rank].get(timeout=DEADLINE_S)
            for target, source in zip(tensors, sent, strict=True):
                target.copy_(source)


def on_threads(num_ranks: int, work: Callable[[int], object]) -> list:
    """work(rank) on one thread per rank; results, or the exceptions, by rank."""
    results: list = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def unwrap(results: list) -> list:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Problem:
    """Random attention split at random; every rank's tensors and both plans."""

    def __init__(self, seed: int, schedule: str, num_ranks: int, mask: Mask | None = None) -> None:
        rng = random.Random(seed)
        self.num_ranks = num_ranks
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * rng.choice([1, 2])
        lengths = tuple(rng.randint(1, 9) * 2 for _ in range(num_ranks))
        masks = [Mask.causal(), Mask.full(), Mask(rng.randint(1, 12), 0)]
        if mask is None:
            mask = masks[0] if schedule in ("balanced", "paper") else rng.choice(masks)
        options = {"num_heads": heads, "num_kv_heads": kv_heads, "mask": mask}
        options["prefetch"] = rng.choice([1, 2])
        self.plans = (
            build(schedule, lengths, **options),
            build_backward(schedule, lengths, **options),
        )
        dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16])
        self.shape = Shape(rng.choice([1, 2]), 8, dtype)
        generator = torch.Generator().manual_seed(seed)

        def tensors(num_heads: int) -> list[Tensor]:
            shapes = [(n, self.shape.batch, num_heads, 8) for n in lengths]
            return [torch.randn(s, generator=generator).to(dtype) for s in shapes]

        self.q, self.k, self.v = tensors(heads), tensors(kv_heads), tensors(kv_heads)
        self.dout = tensors(heads)

    def run(self, rank: int, transports) -> list[Tensor]:
        """out, lse, dq, dk, dv of one rank, twice: the second time in used buffers."""
        results = []
        forward, backward = transports
        for _ in range(2):
            options = {"scale": 0.3, "kernel": "cpu"}
            local = self.q[rank], self.k[rank], self.v[rank]
            out, lse = reference.forward(self.plans[0], rank, *local, transport=forward, **options)
            grads = reference.backward(
                self.plans[1],
                rank,
                self.dout[rank],
                *local,
                out,
                lse,
                transport=backward,
                **options,
            )
            results += [out, lse, *grads]
        return results


def run_reference(problem: Problem) -> list[list[Tensor]]:
    queues = defaultdict(queue.Queue)
    for source in range(problem.num_ranks):
        for target in range(problem.num_ranks):
            queues[source, target] = queue.Queue()

    def work(rank: int) -> list[Tensor]:
        transport = QueueTransport(rank, queues)
        return problem.run(rank, (transport, transport))

    return unwrap(on_threads(problem.num_ranks, work))


def run_native(problem: Problem, seed: int) -> list[list[Tensor]]:
    hub = native.HostHub(problem.num_ranks, seed=seed, max_jitter_us=300)

    def work(rank: int) -> list[Tensor]:
        communicator = native.Communicator.host(hub, rank, DEADLINE_S)
        transports = [
            NativeTransport(communicator, plan, problem.shape, CPU, late=seed % 2 == 0)
            for plan in problem.plans
        ]
        results = problem.run(rank, transports)
        reserved = sum(transport.workspace_bytes for transport in transports)
        assert communicator.memory_reserved_bytes() == reserved
        for transport in transports:
            transport.close(barrier=None)
        assert communicator.memory_reserved_bytes() == 0
        communicator.close(DEADLINE_S)
        return results

    return unwrap(on_threads(problem.num_ranks, work))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_bits_as_the_reference(schedule: str, num_ranks: int) -> None:
    seed = random.randrange(2**31)
    problem = Problem(seed, schedule, num_ranks)
    for rank, (ours, theirs) in enumerate(
        zip(run_native(problem, seed), run_reference(problem), strict=True)
    ):
        for idx, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(our, their), f"seed {seed}, rank {rank}, tensor {idx}"


# ---- flattening ---------------------------------------------------------------------------------


def random_plans(num_ranks: int) -> tuple[Plan, Plan]:
    schedule = random.choice(list(SCHEDULES))
    return Problem(random.randrange(2**31), schedule, num_ranks).plans


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 13])
def test_both_sides_agree_about_every_transfer(num_ranks: int) -> None:
    shape = Shape(2, 16, torch.bfloat16)
    for plan in random_plans(num_ranks):
        flat = [flatten(plan, rank, shape, staged=True) for rank in range(num_ranks)]
        sent, received = defaultdict(list), defaultdict(list)
        for rank, ours in enumerate(flat):
            for step, needed, is_send, peer, name, parts in ours.transfers:
                where = (step, needed, *((rank, peer) if is_send else (peer, rank)))
                rows = [(size, place if is_send else source) for size, place, source in parts]
                (sent if is_send else received)[where].append((name, rows))
        assert sent == received and sent


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_places_do_not_overlap(num_ranks: int) -> None:
    shape = Shape(1, 8, torch.float32)
    for plan in random_plans(num_ranks):
        for rank in range(num_ranks):
            flat = flatten(plan, rank, shape, staged=True)
            for step_idx in range(plan.num_steps):
                spans = []
                for step, *_, parts in flat.transfers:
                    # What arrived in the step before is read while this step's transfers run.
                    spans += [(p, p + s) for s, p, _ in parts if step == step_idx]
                spans.sort()
                ends = [end for _, end in spans]
                assert all(a <= b for a, (b, _) in zip(ends, spans[1:], strict=False))
                assert not ends or ends[-1] <= flat.workspace_bytes


def test_only_one_sided_transports_stage(num_ranks: int = 4) -> None:
    shape = Shape(1, 8, torch.float32)
    for plan in random_plans(num_ranks):
        for rank in range(num_ranks):
            slots_bytes = place_slots(plan, rank, shape)[1]
            assert flatten(plan, rank, shape, staged=False).workspace_bytes == slots_bytes


def test_workspace_beyond_two_to_the_31_elements() -> None:
    """Offsets are 64 bits wide all the way; nothing is allocated here."""
    mask = Mask.causal()
    plan = build("balanced", (1 << 20,) * 4, num_heads=64, num_kv_heads=64, mask=mask)
    flat = flatten(plan, 3, Shape(1, 128, torch.bfloat16), staged=True)
    assert flat.workspace_bytes > 2**33
    assert max(place for *_, parts in flat.transfers for _, place, _ in parts) > 2**32


# ---- one executor per group ---------------------------------------------------------------------


class ThreadExecutor(NativeExecutor):
    """A NativeExecutor whose ranks are threads that meet at a barrier."""

    def __init__(self, rank: int, hub, meeting: list, barrier: threading.Barrier) -> None:
        self._device = CPU
        self._rank, self._num_ranks = rank, len(meeting)
        self._transports, self._timeout_s = OrderedDict(), DEADLINE_S
        self._late = None
        self._communicator = native.Communicator.host(hub, rank, DEADLINE_S)
        self._meeting, self._barrier_of_threads = meeting, barrier
        self._is_closed = False

    def _gather(self, own) -> list:
        self._meeting[self._rank] = own
        self._barrier_of_threads.wait(DEADLINE_S)
        everybody = list(self._meeting)
        self._barrier_of_threads.wait(DEADLINE_S)
        return everybody


def with_executors(num_ranks: int, work: Callable[[int, ThreadExecutor], object]) -> list:
    hub, meeting = native.HostHub(num_ranks), [None] * num_ranks
    barrier = threading.Barrier(num_ranks)
    return on_threads(num_ranks, lambda r: work(r, ThreadExecutor(r, hub, meeting, barrier)))


def test_buffers_are_kept_per_shape_and_bounded() -> None:
    problems = [Problem(seed, "ring", 3) for seed in range(MAX_PLANS)]

    def work(rank: int, executor: ThreadExecutor) -> None:
        plans = [(plan, problem.k[rank]) for problem in problems for plan in problem.plans]
        first = executor.transport(*plans[0])
        assert executor.transport(*plans[0]) is first
        assert executor.memory_reserved() == first.workspace_bytes
        kept = [executor.transport(plan, k) for plan, k in plans][-MAX_PLANS:]
        assert executor.memory_reserved() == sum(made.workspace_bytes for made in kept)
        assert executor.transport(*plans[0]) is not first  # the oldest ones went
        executor.close()
        assert executor.memory_reserved() == 0
        executor.close()

    unwrap(with_executors(3, work))


def test_no_rank_gives_back_what_others_map() -> None:
    """Workspaces and a one-sided transport's own memory; the ranks meet once for all of it."""
    done, meetings, lock = [], [], threading.Lock()

    def note(what: str, rank: int = 0) -> None:
        time.sleep(0.02 * rank)
        with lock:
            done.append(what)

    def work(rank: int, executor: ThreadExecutor) -> None:
        executor._communicator = SimpleNamespace(
            is_one_sided=True,
            unmap_peers=lambda: note("unmapped", rank),
            close=lambda patience_s: note("closed"),
        )
        for idx in range(2):
            transport = SimpleNamespace(
                unmap=lambda: note("unmapped", rank), close=lambda barrier: note("closed")
            )
            executor._transports[idx] = None, transport
        meet = executor._barrier
        executor._barrier = lambda: (meetings.append(rank), meet())
        executor.close()
        executor.close()

    unwrap(with_executors(3, work))
    assert done == ["unmapped"] * 9 + ["closed"] * 12  # communicators twice
    assert sorted(meetings) == [0, 1, 2]


def test_buffers_of_graphs_are_kept() -> None:
    problems = [Problem(seed, "ring", 2) for seed in range(MAX_PLANS)]

    def work(rank: int, executor: ThreadExecutor) -> None:
        plans = [(plan, problem.k[rank]) for problem in problems for plan in problem.plans]
        captured = executor.transport(*plans[0])
        captured.was_captured = True
        kept = [executor.transport(plan, k) for plan, k in plans[1:]][-MAX_PLANS:]
        assert executor.transport(*plans[0]) is captured
        held = sum(made.workspace_bytes for made in [captured, *kept])
        assert executor.memory_reserved() == held
        executor.close()

    unwrap(with_executors(2, work))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rank with a GPU can")
def test_a_rank_without_a_gpu_keeps_nobody_waiting() -> None:
    if not native.with_cuda:
        pytest.skip("built without GPU transports")
    exchanged = []
    with pytest.raises(RuntimeError, match="CUDA"):
        native.Communicator.copy(
            0, 2, 1.0, "never", lambda own: exchanged.append(own) or [b"", b""]
        )
    assert exchanged == [b""]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_a_trial_moves_bytes_between_all_ranks(num_ranks: int) -> None:
    def work(rank: int, executor: ThreadExecutor) -> None:
        for _ in range(2):
            executor.try_out()
            assert executor.memory_reserved() == 0
        executor.close()

    unwrap(with_executors(num_ranks, work))


def test_a_trial_finds_wrong_bytes(monkeypatch) -> None:
    numbers = itertools.count()

    def ever_others(source, target, turn, device) -> Tensor:
        return torch.full((native_layer._TRIAL_BYTES,), next(numbers) % 251, dtype=torch.uint8)

    monkeypatch.setattr(native_layer, "_trial_bytes", ever_others)

    def work(rank: int, executor: ThreadExecutor) -> None:
        with pytest.raises(RuntimeError, match="sent in a trial arrived otherwise"):
            executor.try_out()
        assert executor.memory_reserved() == 0
        executor.close()

    unwrap(with_executors(3, work))


def test_a_rank_that_cannot_stops_all() -> None:
    def work(rank: int, executor: ThreadExecutor) -> None:
        def make() -> str:
            if rank == 1:
                raise RuntimeError("no memory left")
            return "made"

        undone = []
        with pytest.raises(RuntimeError, match="rank 1 of the context-parallel group: no memory"):
            executor._agree(make, undo=undone.append)
        assert undone == ([] if rank == 1 else ["made"])
        executor.close()

    unwrap(with_executors(3, work))


# ---- failures -----------------------------------------------------------------------------------


def run_with_a_broken_rank(num_ranks: int, broken: int, breaks: Callable[[], None]) -> list:
    """What every rank raises when one of them breaks in its forward."""
    problem = Problem(random.randrange(2**31), "ring", num_ranks, Mask.causal())
    plan = problem.plans[0]
    hub = native.HostHub(num_ranks)

    def work(rank: int) -> None:
        communicator = native.Communicator.host(hub, rank, 0.4)
        transport = NativeTransport(communicator, plan, problem.shape, CPU)
        if rank == broken:
            breaks()
        local = problem.q[rank], problem.k[rank], problem.v[rank]
        reference.forward(plan, rank, *local, scale=1.0, kernel="cpu", transport=transport)

    return on_threads(num_ranks, work)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_dead_rank_ends_the_others(num_ranks: int) -> None:
    def die() -> None:
        raise KeyError("dead")

    results = run_with_a_broken_rank(num_ranks, broken=0, breaks=die)
    assert isinstance(results[0], KeyError)
    for rank in range(1, num_ranks):
        assert isinstance(results[rank], native.CommunicationError), results[rank]
    message = str(results[1])
    assert "step 0 of the ring forward plan" in message or "the group was ended" in message
    # The first to complain waits for the dead rank or for one that does.
    whole = " ".join(str(result) for result in results[1:])
    assert "peer rank " in whole and "bytes" in whole and "kv of tokens" in whole


@pytest.mark.timeout(60)
def test_an_abandoned_call_ends_the_group() -> None:
    hub = native.HostHub(1)
    communicator = native.Communicator.host(hub, 0, 5.0)
    executors = [native.Executor(communicator, name, 1, 0, []) for name in ("first", "second")]
    executors[0].begin(0)
    with pytest.raises(native.CommunicationError, match="second plan before its call of the first"):
        executors[1].begin(0)
    with pytest.raises(native.CommunicationError, match="out of step"):
        communicator.check()


def test_what_a_failed_call_sent_stays() -> None:
    """The next call fails too, and must not let go of what transfers may still read."""
    problem = Problem(random.randrange(2**31), "ring", 1, Mask.causal())
    communicator = native.Communicator.host(native.HostHub(1), 0, 5.0)
    transport = NativeTransport(communicator, problem.plans[0], problem.shape, CPU)
    transport.executor = SimpleNamespace(open_step=lambda *_: None)
    first, second = torch.zeros(1), torch.zeros(1)
    transport.post(0, [(None, [first])], [])
    transport.post(0, [(None, [second])], [])
    assert transport._held[0][0] is first


def test_wrong_use_is_refused() -> None:
    hub = native.HostHub(2)
    communicator = native.Communicator.host(hub, 0, 5.0)
    with pytest.raises(ValueError, match="not another rank"):
        native.Executor(communicator, "bad", 1, 64, [(0, 1, True, 0, "to itself", [(8, 0, 0)])])
    with pytest.raises(ValueError, match="inside the workspace"):
        native.Executor(communicator, "bad", 1, 64, [(0, 1, False, 1, "too long", [(65, 0, 0)])])
    with pytest.raises(ValueError, match="deadline"):
        native.Communicator.host(hub, 0, 0.0)
    executor = native.Executor(communicator, "good", 2, 64, [(1, 2, True, 1, "x", [(8, -1, 0)])])
    with pytest.raises(RuntimeError, match="outside of a call"):
        executor.post(0, [], 0)
    executor.begin(0)
    with pytest.raises(RuntimeError, match="in order"):
        executor.post(1, [], 0)
    executor.post(0, [], 0)
    with pytest.raises(RuntimeError, match="sends 1 tensors, got 0"):
        executor.post(1, [], 0)
    communicator.close(DEADLINE_S)
    with pytest.raises(native.CommunicationError, match="closed"):
        executor.post(1, [8], 0)
