"""Merging partials and standing in for an output, against float64 and at the formats' edges."""

import math

import pytest
import torch

from megatron_distflash.runtime.state import (
    add,
    cast,
    delta_of,
    merge,
    stand_in_output,
    state_dtype,
)
from tests.runtime.states import empty_state

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = (6, 2, 3)  # n, b, h
HEAD_DIM = 8


@pytest.fixture
def generator(seed) -> torch.Generator:
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    """On a GPU the sums are those of our own row kernels, where they are built."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


def random_state(generator, dtype, gap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.randn(*ROWS, HEAD_DIM, generator=generator, dtype=torch.float64)
    lse = 3 * torch.randn(ROWS, generator=generator, dtype=torch.float64) + gap
    return out.to(dtype), lse.to(state_dtype(dtype))


def merged_in_float64(out, lse, partial, partial_lse):
    """The definition, with the larger weight taken out first."""
    out, lse, partial, partial_lse = (x.double() for x in (out, lse, partial, partial_lse))
    top = torch.maximum(lse, partial_lse)
    safe = torch.where(top == -torch.inf, 0.0, top)
    ours, theirs = (lse - safe).exp(), (partial_lse - safe).exp()
    total = ours + theirs
    weighted = ours[..., None] * out + theirs[..., None] * partial
    return weighted / total.clamp(min=1e-300)[..., None], safe + total.log()


@pytest.mark.parametrize("gap", [0.0, 1.0, -30.0, 88.0, -104.0, 800.0, 1e4, -1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(generator, device, dtype, gap):
    state, lse = (x.to(device) for x in random_state(generator, state_dtype(dtype)))
    partial, partial_lse = (x.to(device) for x in random_state(generator, dtype, gap))
    expected = merged_in_float64(state, lse, partial, partial_lse)
    merge(state, lse, partial, partial_lse)
    # Weights are exponentials of differences of LSEs, so they inherit the LSEs' absolute rounding.
    eps = torch.finfo(lse.dtype).eps
    tolerance = 8 * eps * (1 + 20 + abs(gap))
    torch.testing.assert_close(state.double(), expected[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_into_rows_that_saw_no_key(generator, device, dtype):
    q = torch.empty(*ROWS, HEAD_DIM, dtype=dtype, device=device)
    out, lse = empty_state(q)
    partial, partial_lse = (x.to(device) for x in random_state(generator, dtype))
    partial[0], partial_lse[0] = 0, -torch.inf
    merge(out, lse, partial, partial_lse)
    assert torch.equal(out, partial.to(out.dtype))
    assert torch.equal(lse, partial_lse)
    before = out.clone(), lse.clone()
    merge(out, lse, *empty_state(q))
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])


@pytest.mark.parametrize("gap", [0.0, 1e4])
def test_merging_many_partials_in_any_order(generator, gap):
    parts = [random_state(generator, torch.float64, gap * (idx % 3)) for idx in range(12)]
    results = []
    for order in (range(12), torch.randperm(12, generator=generator).tolist()):
        out, lse = empty_state(parts[0][0])
        for idx in order:
            merge(out, lse, *parts[idx])
        results.append((out, lse))
    atol = 1e-13 * (1 + gap)
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=atol)
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    weights = lses.softmax(0)
    expected = (weights[..., None] * outs).sum(0), lses.logsumexp(0)
    torch.testing.assert_close(results[0], expected, rtol=1e-13, atol=atol)


def test_merge_keeps_a_constant_constant(generator, device):
    """All values equal: whatever the weights, so is their mean, also where LSEs are large."""
    out, lse = (x.to(device) for x in random_state(generator, torch.float32, gap=5000.0))
    partial, partial_lse = (
        x.to(device) for x in random_state(generator, torch.float32, gap=5000.0)
    )
    out.fill_(3.0)
    partial.fill_(3.0)
    merge(out, lse, partial, partial_lse)
    torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=1e-6, atol=0)


def rounded_delta(out, dout):
    """The delta that a kernel forms from an output and an output gradient of this dtype."""
    return (out.double() * dout.double()).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stand_in_output_gives_delta(generator, dtype):
    dout, _ = random_state(generator, dtype)
    delta = torch.randn(ROWS, generator=generator, dtype=torch.float64).to(state_dtype(dtype))
    out = stand_in_output(dout, delta)
    assert out.dtype == dtype and out.shape == dout.shape
    # Every term has delta's sign, so the terms' relative rounding is the sum's; twice for the
    # float32 arithmetic before it. Float16 runs out of small numbers: there a term is off by half
    # of the smallest one.
    error = (rounded_delta(out, dout) - delta.double()).abs()
    relative = torch.finfo(dtype).eps + 8 * torch.finfo(delta.dtype).eps
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = relative * delta.double().abs() + smallest / 2 * dout.double().abs().sum(-1)
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stand_in_output_of_zero_rows(generator, dtype):
    dout, _ = random_state(generator, dtype)
    out, _ = random_state(generator, dtype)
    dout[1], dout[2, :, 1] = 0, 0
    stand_in = stand_in_output(dout, delta_of(out, dout))
    assert (stand_in[1] == 0).all() and (stand_in[2, :, 1] == 0).all()
    assert stand_in.isfinite().all()
    nothing = stand_in_output(dout[:0], delta_of(out, dout)[:0])
    assert nothing.shape == (0, *dout.shape[1:])


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e-7, 1e4, 1e18, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stand_in_output_of_tiny_and_huge_gradients(generator, device, dtype, size):
    """Scaling the gradients scales delta; it must neither vanish nor overflow on the way."""
    if dtype == torch.float16 and not 1e-8 < size < 1e5:
        pytest.skip("float16 has no such numbers")
    dout, out = (random_state(generator, dtype)[0].to(device) for _ in range(2))
    dout = (dout.clamp(-4, 4) * size).to(dtype)
    delta = delta_of(out, dout)
    stand_in = stand_in_output(dout, delta)
    assert stand_in.isfinite().all()
    largest = (dout.double().norm(dim=-1) * out.double().norm(dim=-1)).clamp(min=1e-300)
    error = (rounded_delta(stand_in, dout) - delta.double()).abs() / largest
    subnormal = dtype == torch.float16 and size < 1e-6
    assert error.max() <= 2 * torch.finfo(dtype).eps * (20 if subnormal else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stand_in_output_loses_less_than_the_true_one(generator, dtype):
    """delta from the 16-bit stand-in is nearer to the true delta than from the 16-bit output."""
    out = torch.randn(2000, 1, 1, 64, generator=generator, dtype=torch.float64)
    dout = torch.randn(2000, 1, 1, 64, generator=generator, dtype=torch.float64).to(dtype)
    delta = delta_of(out, dout.double())
    ours = rounded_delta(stand_in_output(dout, delta.float()), dout) - delta
    theirs = rounded_delta(out.to(dtype), dout) - delta
    ratio = (ours.square().mean() / theirs.square().mean()).sqrt().item()
    assert math.isfinite(ratio) and ratio < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_over_a_part_of_the_heads(generator, device, dtype):
    """Views with gaps between rows, as plans cut them; against the same sums in float64."""
    shape = (70, 2, 6, 64)
    total, part, dout = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    part, dout = part.to(dtype), dout.to(dtype)
    views = [x[3:, :, 2:5] for x in (total, part, dout)]
    expected = views[0].double() + views[1].double()
    untouched = total[:, :, 5:].clone()
    add(*views[:2])
    torch.testing.assert_close(views[0].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(total[:, :, 5:], untouched)
    delta = delta_of(*views[1:])
    expected = (views[1].double() * views[2].double()).sum(-1)
    torch.testing.assert_close(delta.double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.zeros_like(part)
    cast(out[3:, :, 2:5], views[0])
    assert torch.equal(out[3:, :, 2:5], views[0].to(dtype)) and (out[:3] == 0).all()
