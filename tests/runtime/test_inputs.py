"""Inputs of any strides, any set of wanted gradients, and results that stay what they are."""

from functools import partial

import pytest
import torch

from megatron_distflash.runtime.attention import dist_flash_attention
from tests.runtime.ranks import NAMES, Case, attend_on_rank, check, gather, plain


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in other places of memory; shape [n, b, h, d]."""
    if layout == "heads first":
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    if layout == "head dim first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if layout == "sliced":  # as from a fused projection, with a token before and after
        wide = x.new_full((x.shape[0] + 2, x.shape[1], 2 * x.shape[2], x.shape[3] + 3), torch.nan)
        wide[1:-1, :, 1::2, 2:-1] = x
        return wide[1:-1, :, 1::2, 2:-1]
    if layout == "every second":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    assert layout == "expanded"
    return x[:1, :, :1].expand_as(x)


LAYOUTS = ("heads first", "head dim first", "sliced", "every second", "expanded")


def attend_strided(rank, group, case: Case, input_layout: str, grad_layout: str) -> dict:
    """``attend_on_rank`` with strided inputs and a strided incoming gradient; and once without."""
    values = [x[case.tokens_of(rank)] for x in case.inputs()]
    layouts = (*[input_layout] * 3, grad_layout)
    values = [strided(x, layout) for x, layout in zip(values, layouts, strict=True)]
    results = []
    for q, k, v, dout in (values, [x.clone(memory_format=torch.contiguous_format) for x in values]):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        assert leaves[0].stride() == q.stride()
        out, lse = dist_flash_attention(*leaves, group=group, return_lse=True, **case.options)
        out.backward(dout)
        results.append((out.detach(), lse, *(x.grad for x in leaves)))
    # On some processors torch's matrix products add up strided numbers in another order.
    equal = partial(torch.allclose, rtol=1e-12, atol=1e-12)
    return {name: equal(*both) for name, *both in zip(NAMES, *results, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_strides(ranks, seed, num_ranks, layout):
    """To float64's rounding what contiguous tensors of the same numbers give, which are right."""
    case = Case(seed, (5,) * num_ranks, (4, 2), batch=2)
    other = LAYOUTS[seed % len(LAYOUTS)]
    for layouts in ((layout, layout), (layout, other), (other, layout)):
        for equal in ranks.run(attend_strided, case, *layouts, world=num_ranks):
            assert all(equal.values()), (equal, case, layouts)


def attend_with_sum(rank, group, case: Case) -> dict:
    """The gradient of a sum is one number, expanded to the output's shape."""
    q, k, v, _ = (x[case.tokens_of(rank)].requires_grad_() for x in case.inputs())
    dist_flash_attention(q, k, v, group=group, **case.options).sum().backward()
    return {"dq": q.grad, "dk": k.grad, "dv": v.grad}


def test_expanded_gradient_of_a_sum(ranks, seed):
    case = Case(seed, (5, 6, 7))
    found = gather(case, ranks.run(attend_with_sum, case, world=3))
    check(case, found, expected=plain(case, torch.ones(18, 1, 4, 8, dtype=torch.float64)))


def attend_wanting(rank, group, case: Case, wanted: str) -> dict:
    """``attend_on_rank`` where only the tensors named in ``wanted`` require gradients."""
    *inputs, dout = (x[case.tokens_of(rank)] for x in case.inputs())
    leaves = dict(zip("qkv", inputs, strict=True))
    for name in wanted:
        leaves[name].requires_grad_()
    out, lse = dist_flash_attention(*leaves.values(), group=group, return_lse=True, **case.options)
    assert out.requires_grad == bool(wanted) and not lse.requires_grad
    if wanted:
        out.backward(dout)
    results = {"out": out.detach(), "lse": lse}
    return results | {f"d{name}": x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("wanted", ["", "q", "k", "v", "qv"])
def test_gradients_of_some_inputs(ranks, seed, wanted):
    case = Case(seed, (5, 6, 7))
    parts = ranks.run(attend_wanting, case, wanted, world=3)
    everything = ranks.run(attend_on_rank, case, world=3)
    for part, whole in zip(parts, everything, strict=True):
        for name, value in part.items():
            if name in ("out", "lse") or name[1] in wanted:
                assert torch.equal(value, whole[name]), (name, case)
            else:
                assert value is None, (name, case)


def attend_then_overwrite(rank, group, case: Case) -> dict:
    """Overwrites the inputs after the forward, and the results of a second call after it."""
    q, k, v, _ = (x[case.tokens_of(rank)] for x in case.inputs())
    out, lse = dist_flash_attention(q, k, v, group=group, return_lse=True, **case.options)
    before = out.clone(), lse.clone()
    again, again_lse = dist_flash_attention(q, k, v, group=group, return_lse=True, **case.options)
    again.zero_(), again_lse.zero_()
    for x in (q, k, v):
        x.zero_()
    return {"out": torch.equal(out, before[0]), "lse": torch.equal(lse, before[1])}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(6,), (1,), (6, 6), (6, 0, 1)], ids=str)
def test_results_own_their_memory(ranks, seed, lengths, dtype):
    case = Case(seed, lengths, (2, 2), dtype=dtype)
    for rank, equal in enumerate(ranks.run(attend_then_overwrite, case, world=len(lengths))):
        assert all(equal.values()), (rank, equal, case)


def change_input_before_backward(rank, group, case: Case) -> str:
    q, k, v, _ = (x[case.tokens_of(rank)].requires_grad_() for x in case.inputs())
    out = dist_flash_attention(q, k, v, group=group, **case.options)
    with torch.no_grad():
        k.add_(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_saved_input_must_not_change(ranks, seed):
    """Autograd's own check holds: never a gradient of other numbers than the forward's."""
    for message in ranks.run(change_input_before_backward, Case(seed, (4, 4)), world=2):
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_results(ranks, seed, dtype):
    case = Case(seed, (9, 8, 7), (4, 2), dtype=dtype)
    parts = ranks.run(attend_on_rank, case, world=3)
    for part in parts:
        assert part["lse"].dtype == torch.float32
        assert {part[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}
    # 16 bits: one rounding of a result of size 4 at most, a few more of partial results.
    check(case, gather(case, parts), tolerance=16 * torch.finfo(dtype).eps)


def test_lse_of_16_bit_inputs_is_not_rounded_to_16_bits(ranks, seed):
    case = Case(seed, (9, 8, 7), dtype=torch.bfloat16)
    lse = {"lse": gather(case, ranks.run(attend_on_rank, case, world=3))["lse"]}
    check(case, lse, tolerance=1e-5)


def test_a_batch_of_none(ranks, seed):
    """Nothing in, nothing out; also the last, incomplete batch of a run may be empty."""
    case = Case(seed, (3, 4), batch=0)
    for rank, part in enumerate(ranks.run(attend_on_rank, case, world=2)):
        assert part["out"].shape == (case.lengths[rank], 0, 4, 8)
        assert part["dv"].shape == (case.lengths[rank], 0, 2, 8)


def infer(rank, group, case: Case) -> torch.Tensor:
    q, k, v, _ = (x[case.tokens_of(rank)] for x in case.inputs())
    with torch.inference_mode():
        return dist_flash_attention(q, k, v, group=group, **case.options).clone()


def test_inference_mode(ranks, seed):
    case = Case(seed, (4, 5))
    parts = [{"out": out} for out in ranks.run(infer, case, world=2)]
    check(case, gather(case, parts))
