"""The executor on random plans, with our kernels or one chosen at random for each task: what one
leaves for another, and for the wire, is written before it is read. The ranks are threads."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distflash.plan import SCHEDULES, build, build_backward
from megatron_distflash.plan.plan import Plan, Transfer
from megatron_distflash.runtime import blocks, program, reference
from tests.plan import cases
from tests.runtime.fake_kernels import on_the_cpu
from tests.runtime.ranks import NAMES, Case, check, gather

KERNELS = [("cuda",), ("cpu", "cuda")]
PATIENCE_S = 60


class Exchange:
    """One rank's transport: what is sent lies in ``mail`` until all ranks meet at the step's end.

    What is received into holds NaN before; NaN that is sent is an AssertionError.
    """

    def __init__(self, mail: dict[tuple[int, Transfer], list[Tensor]], meet: Barrier) -> None:
        self._mail, self._meet = mail, meet
        self._step_idx, self._receives = -1, []

    def targets(self, transfer, wires, device) -> list[Tensor]:
        return [torch.full(wire.shape, torch.nan, dtype=wire.dtype) for wire in wires]

    def post(self, step_idx, sends, receives) -> None:
        for transfer, tensors in sends:
            assert all(x.is_contiguous() and not x.isnan().any() for x in tensors), transfer
            self._mail[step_idx, transfer] = tensors
        self._step_idx, self._receives = step_idx, receives

    def wait(self) -> None:
        self._meet.wait(PATIENCE_S)
        for transfer, targets in self._receives:
            tensors = self._mail.pop((self._step_idx, transfer))
            for target, x in zip(targets, tensors, strict=True):
                assert (target.shape, target.dtype) == (x.shape, x.dtype)
                target.copy_(x)


def on_all_ranks(num_ranks: int, call: Callable[[int, Exchange], tuple]) -> list[tuple]:
    mail, meet = {}, Barrier(num_ranks)

    def one(rank: int) -> tuple:
        try:
            return call(rank, Exchange(mail, meet))
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(num_ranks)]
    problems = [future.exception() for future in futures]
    lost = [x for x in problems if x is not None]
    for problem in sorted(lost, key=lambda x: isinstance(x, RuntimeError)):  # first the cause
        raise problem
    assert not mail, "sent to nobody"
    return [future.result() for future in futures]


def problem(rng: random.Random) -> tuple[Case, dict]:
    """A case, and how its plans are built. Drawn evenly: hypothesis likes to draw few tokens and
    documents, whose blocks seldom overlap."""
    num_ranks = rng.randint(1, 8)
    lengths = [rng.choice([0, 1, 2, rng.randint(3, 12)]) for _ in range(num_ranks)]
    lengths = lengths if sum(lengths) and rng.random() < 0.6 else [rng.randint(1, 12)] * num_ranks
    schedule, num_tokens = rng.choice(sorted(SCHEDULES)), sum(lengths)
    causal, window, documents = rng.random() < 0.7, None, ()
    if schedule in ("ring", "zigzag"):
        window = rng.choice([None, rng.randint(1, num_tokens)]) if causal else None
        cuts = rng.sample(range(1, num_tokens), rng.randint(0, min(8, num_tokens - 1)))
        documents = rng.choice([(), (0, *sorted(cuts), num_tokens)])
    options = {"heads": rng.choice(cases.HEADS), "batch": rng.randint(1, 2), "head_dim": 4}
    case = Case(
        rng.getrandbits(31),
        tuple(lengths),
        schedule=schedule,
        causal=causal,
        window=window,
        documents=documents,
        **options,
    )
    return case, {"prefetch": rng.randint(1, 3), "cut": rng.random() < 0.7}


def attend(case: Case, plans: list[Plan]) -> dict[str, Tensor]:
    """``NAMES`` of the whole sequence; inputs and results stay as they are afterwards."""
    tensors = [[x[case.tokens_of(rank)] for x in case.inputs()] for rank in range(case.num_ranks)]
    options = {"scale": case.head_dim**-0.5, "kernel": "any"}

    def forward(rank: int, transport: Exchange) -> tuple:
        q, k, v, _ = tensors[rank]
        return reference.forward(plans[0], rank, q, k, v, **options, transport=transport)

    def backward(rank: int, transport: Exchange) -> tuple:
        q, k, v, dout = tensors[rank]
        inputs = dout, q, k, v, *results[rank]
        return reference.backward(plans[1], rank, *inputs, **options, transport=transport)

    results = on_all_ranks(case.num_ranks, forward)
    kept = [[x.clone() for x in (*tensors[r], *results[r])] for r in range(case.num_ranks)]
    grads = on_all_ranks(case.num_ranks, backward)
    for rank, before in enumerate(kept):
        after = *tensors[rank], *results[rank]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    parts = zip(results, grads, strict=True)
    return gather(case, [dict(zip(NAMES, (*a, *b), strict=True)) for a, b in parts])


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=True))
def test_any_plan_with_any_kernel_for_each_task(rng):
    case, options = problem(rng)
    kernels = rng.choice(KERNELS)
    heads = {"num_heads": case.heads[0], "num_kv_heads": case.heads[1]}
    plans = [
        make(case.schedule, case.lengths, **heads, mask=case.mask, **options)
        for make in (build, build_backward)
    ]

    def choose(plan, task, kernel, q):
        name = random.Random(repr((case.seed, plan.direction, task))).choice(kernels)
        return blocks._KERNELS[name]

    with on_the_cpu(), mock.patch.object(program, "choose_for", choose):
        check(case, attend(case, plans))


def test_what_is_not_finished_is_not_sent():
    """The transport above finds what it is there for."""
    exchange = Exchange({}, Barrier(1))
    with pytest.raises(AssertionError, match="a transfer"):
        exchange.post(0, [("a transfer", [torch.full((2,), torch.nan)])], [])
