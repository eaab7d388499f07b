"""What a rank's program remembers, and what it must not: tensors' strides are each call's own."""

import random
from itertools import pairwise

import pytest
import torch

from megatron_distflash.plan import Mask, build, build_backward
from megatron_distflash.runtime import program, reference
from megatron_distflash.runtime.program import Piece, program_of
from megatron_distflash.runtime.reference import NoTransport

HEADS = {"num_heads": 4, "num_kv_heads": 2, "mask": Mask.causal()}
DOCUMENTS = {**HEADS, "mask": Mask(None, 0, (0, 3, 9, 16))}  # several tasks on one rank


def random_strides(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """In any order of dimensions in memory but the last one's, and with space around it."""
    order = [*rng.sample(range(3), 3), *range(3, len(shape))]
    wide = torch.randn([shape[dim] + (2 if dim < 3 else 0) for dim in order])
    x = wide.permute([order.index(dim) for dim in range(len(shape))])
    return x[1 : 1 + shape[0], 1 : 1 + shape[1], 2 : 2 + shape[2]]


@pytest.mark.parametrize("inner", [(), (8,)], ids=["rows", "vectors"])
def test_a_piece_is_a_slice(inner):
    rng = random.Random()
    for _ in range(50):
        tokens, batch, heads = (rng.randint(1, 9) for _ in range(3))
        x = random_strides(rng, (tokens, batch, heads, *inner))
        row, head = rng.randrange(tokens), rng.randrange(heads)
        num_rows, num_heads = rng.randint(1, tokens - row), rng.randint(1, heads - head)
        piece = Piece(row, head, (num_rows, batch, num_heads, *inner)).of(x)
        expected = x[row : row + num_rows, :, head : head + num_heads]
        assert piece.data_ptr() == expected.data_ptr()
        assert (piece.shape, piece.stride()) == (expected.shape, expected.stride())


def run(plans, tensors, kernel: str = "cpu") -> list[torch.Tensor]:
    q, k, v, dout = tensors
    how = {"scale": 0.3, "kernel": kernel, "transport": NoTransport()}
    out, lse = reference.forward(plans[0], 0, q, k, v, **how)
    return [out, lse, *reference.backward(plans[1], 0, dout, q, k, v, out, lse, **how)]


def test_a_program_serves_tensors_of_any_strides():
    plans = [make("ring", (16,), **DOCUMENTS) for make in (build, build_backward)]
    rng = random.Random()
    shapes = [(16, 2, heads, 8) for heads in (4, 2, 2, 4)]
    for _ in range(5):
        tensors = [random_strides(rng, shape) for shape in shapes]
        found, expected = run(plans, tensors), run(plans, [x.contiguous() for x in tensors])
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_program_is_remembered_by_all_that_it_depends_on():
    plan = build("balanced", (16, 16), **HEADS)
    k = torch.zeros(16, 1, 2, 8)
    first = program_of(plan, 0, "cpu", k)
    assert program_of(plan, 0, "cpu", torch.ones(16, 1, 2, 8)[:, :, :]) is first
    others = [
        program_of(build_backward("balanced", (16, 16), **HEADS), 0, "cpu", k),
        program_of(plan, 1, "cpu", k),
        program_of(plan, 0, "auto", k),
        program_of(plan, 0, "cpu", k.double()),
        program_of(plan, 0, "cpu", k.expand(16, 3, 2, 8)),
        program_of(plan, 0, "cpu", k[..., :4]),
    ]
    torch.use_deterministic_algorithms(True)
    try:
        others.append(program_of(plan, 0, "cpu", k))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({id(x) for x in (first, *others)}) == 8
    assert program._program.cache_info().maxsize is not None


def test_a_kernel_that_refuses_is_asked_again():
    plan, k = build("balanced", (16,), **HEADS), torch.zeros(16, 1, 2, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            program_of(plan, 0, "cuda", k)


def test_steps_are_named_while_a_profiler_runs():
    plans = [make("ring", (16,), **DOCUMENTS) for make in (build, build_backward)]
    tensors = [torch.randn(16, 1, heads, 8) for heads in (4, 2, 2, 4)]
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        run(plans, tensors)
    names = [e.name for e in profile.events() if e.name.startswith("distflash step")]
    documents = pairwise(DOCUMENTS["mask"].documents)
    tasks = " ".join(f"q{a}:{b}/k{a}:{b}/h0:2" for a, b in documents)
    assert names == 2 * ["distflash step 0 post", f"distflash step 0 {tasks}"]
