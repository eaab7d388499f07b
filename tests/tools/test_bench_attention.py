"""What the attention benchmark decides without a GPU: the table it writes, the plan it replays."""

import json

import pytest
import torch
from bench_attention_replay import ROW_VALUE
from bench_attention_tune import HEAD_DIMS, SHAPES, band_of, lines
from bench_unmoved import Unmoved

from megatron_distflash.plan import Mask, build, build_backward
from megatron_distflash.runtime import reference
from megatron_distflash.runtime.blocks import candidates, read_table
from megatron_distflash.runtime.program import Wire


@pytest.mark.parametrize("shape", SHAPES)
def test_bands_have_the_shapes_that_they_are_measured_for(shape):
    assert band_of(shape, 1024).shape(1024, 1024) == shape


def test_table_names_the_fastest_by_size_and_says_nothing_twice(tmp_path):
    ranked = {
        1024: ["cuda", "cudnn", "fa4"],
        4096: ["cuda", "fa4", "cudnn"],
        16384: ["fa4", "cudnn", "cuda"],
    }
    written = lines("backward", 128, "full", ranked)
    assert [(line["min_tokens"], line["kernel"]) for line in written] == [
        (16384, "fa4"),
        (16384, "cudnn"),  # where flash-attn-4 is not installed
        (0, "cuda"),
    ]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(written))
    table = read_table(path)
    assert candidates("backward", 128, "full", 20000, table)[:2] == ["fa4", "cudnn"]
    assert candidates("backward", 128, "full", 5000, table)[0] == "cuda"
    assert 128 in HEAD_DIMS


@pytest.mark.parametrize("schedule", ["balanced", "ring", "zigzag"])
def test_every_rank_of_a_plan_replays_alone(schedule):
    heads = {"num_heads": 4, "num_kv_heads": 2, "mask": Mask(None, 0, ())}
    forward = build(schedule, (16,) * 4, **heads)
    backward = build_backward(schedule, (16,) * 4, **heads)
    for rank in range(4):
        q, dout = (torch.randn(16, 1, 4, 8) for _ in range(2))
        k, v = (torch.randn(16, 1, 2, 8) for _ in range(2))
        how = {"scale": 0.3, "kernel": "cpu", "transport": Unmoved(ROW_VALUE)}
        out, lse = reference.forward(forward, rank, q, k, v, **how)
        grads = reference.backward(backward, rank, dout, q, k, v, out, lse, **how)
        assert all(torch.isfinite(x).all() for x in (out, lse, *grads))


def test_what_would_arrive_is_made_once_a_slot():
    plan = build("ring", (16,) * 4, num_heads=2, num_kv_heads=2, mask=Mask(None, 0, ()))
    transfer = next(t for step in plan.steps[3] for t in step.receives)
    wires = [
        Wire((16, 1, 2, 8), torch.bfloat16),
        Wire((1, 2, 16), torch.float32),
    ]
    unmoved = Unmoved(ROW_VALUE)
    first = unmoved.targets(transfer, wires, torch.device("cpu"))
    assert [(x.shape, x.dtype) for x in first] == [(torch.Size(w.shape), w.dtype) for w in wires]
    assert unmoved.targets(transfer, wires, torch.device("cpu")) is first
