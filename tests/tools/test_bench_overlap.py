"""What the overlap benchmark checks before it times."""

import argparse
import random

import bench_overlap
import pytest
import torch
from bench_overlap import NAMES, Bench
from torch import Tensor

from megatron_distflash.runtime import reference


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Of one rank, which moves nothing."""
    monkeypatch.setattr(bench_overlap.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench_overlap.dist, "get_world_size", lambda: 1)
    args = argparse.Namespace(
        heads=4, kv_heads=2, head_dim=16, schedule="balanced", prefetch=2, no_cut=False,
        kernel="cpu", backward=True, seed=random.randrange(2**31),
    )  # fmt: skip
    return Bench(args, 64, torch.device("cpu"))


def test_right_results_pass(bench: Bench) -> None:
    bench.check([reference.NoTransport()] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_result_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = bench.call

    def wrong(transports: list) -> list[Tensor]:
        return [x * 1.05 if n == name else x for n, x in zip(NAMES, right(transports), strict=True)]

    monkeypatch.setattr(bench, "call", wrong)
    with pytest.raises(AssertionError, match=f"rank 0: {name} is off by"):
        bench.check([reference.NoTransport()] * 2)
