"""16-bit inputs: the error against float64 is that of one rank's attention, and does not grow with
the number of ranks."""

import pytest
import torch
import torch.nn.functional as F

from tests.runtime.ranks import Case, attend, attend_on_rank, plain

MEASURED = ("out", "dq", "dk", "dv")
LENGTH = 384
LIMIT = 1.3  # The promise, against torch's own attention on one rank.
# Against our own path on one rank, which on the CPU computes in float32 and rounds results once.
# A partial result that crosses the wire is rounded once more; these roundings are independent, so
# they add another error of the same size at most, whatever P is: sqrt(2), and 5% for chance.
LIMIT_OWN = 1.05 * 2**0.5
GROWTH = 1.15  # From 4 to 8 ranks. With every rank its own rounding, it would be sqrt(2).


def torch_attention(case: Case) -> dict[str, torch.Tensor]:
    """One rank, torch's own attention in the case's dtype."""
    leaves = [x.permute(1, 2, 0, 3).requires_grad_() for x in case.inputs()[:3]]
    dout = case.inputs()[3].permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(*leaves, is_causal=case.causal, enable_gqa=True)
    out.backward(dout)
    tensors = (out.detach(), *(x.grad for x in leaves))
    return {name: x.permute(2, 0, 1, 3) for name, x in zip(MEASURED, tensors, strict=True)}


def errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[float]:
    """Relative Frobenius error of each of ``MEASURED``."""
    return [
        ((found[name].double() - expected[name]).norm() / expected[name].norm()).item()
        for name in MEASURED
    ]


@pytest.mark.parametrize("values", ["normal", "peaked", "shifted"])
@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("balanced", torch.bfloat16),
        ("balanced", torch.float16),
        ("paper", torch.bfloat16),
        ("zigzag", torch.bfloat16),
    ],
    ids=str,
)
def test_error_does_not_grow_with_ranks(ranks, seed, schedule, dtype, values):
    def split(num_ranks: int) -> Case:
        lengths = (LENGTH // num_ranks,) * num_ranks
        return Case(seed, lengths, (4, 2), schedule, head_dim=32, dtype=dtype, values=values)

    # Zigzag's tokens come home in sequence order: all these cases have the same inputs.
    expected = plain(split(1))
    errors_by_run = {
        "torch": errors(torch_attention(split(1)), expected),
        "P = 1": errors(attend_on_rank(0, None, split(1)), expected),
    }
    for num_ranks in (2, 4, 8):
        errors_by_run[f"P = {num_ranks}"] = errors(attend(ranks, split(num_ranks)), expected)
    table = "\n".join(
        f"{name:>6} " + " ".join(f"{error:9.2e}" for error in row)
        for name, row in errors_by_run.items()
    )
    print(f"seed {seed}\n       " + " ".join(f"{name:>9}" for name in MEASURED) + f"\n{table}")
    for idx, name in enumerate(MEASURED):
        of = {run: row[idx] for run, row in errors_by_run.items()}
        message = f"{name}, seed {seed}\n{table}"
        for num_ranks in (2, 4, 8):
            assert of[f"P = {num_ranks}"] <= LIMIT * of["torch"], message
            assert of[f"P = {num_ranks}"] <= LIMIT_OWN * of["P = 1"], message
        assert of["P = 8"] <= GROWTH * of["P = 4"], message
