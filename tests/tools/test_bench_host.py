"""The benchmark of the host's time: that nothing runs, but all that a call needs is done."""

import bench_host
import pytest
import torch

from megatron_distflash.runtime import blocks, reference, tape

SHAPE = bench_host.Shape(tokens=8, batch=1, heads=4, kv_heads=2, head_dim=64)


def test_a_line_for_every_case(capsys):
    bench_host.main(["--ranks", "2", "--schedule", "balanced", "ring", "--turns", "3"])
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:5] == ["schedule", "ranks", "rank", "what", "direction"]
    wanted = [
        [schedule, "2", rank, kernel, direction]
        for schedule in ("balanced", "ring")
        for kernel in bench_host.KERNELS
        for direction in ("forward", "backward")
        for rank in ("0", "1")
    ]
    assert [line[:5] for line in lines] == wanted
    for *_, median, quickest, steps, per_step in lines:
        assert 0 < float(quickest) <= float(median)
        assert float(per_step) == pytest.approx(float(median) / int(steps), abs=0.6)


def test_a_profile_says_where_the_time_goes(capsys):
    arguments = ["--ranks", "2", "--rank", "1", "--kernel", "none", "--turns", "3", "--profile"]
    bench_host.main(arguments)
    assert capsys.readouterr().out.count("reference.py") > 4


@pytest.mark.parametrize("schedule", ["balanced", "zigzag"])
def test_every_call_of_our_library_is_made(schedule, kernel="cuda"):
    """A launch a step, and one row call for each merge, sum and cast."""
    both = bench_host.plans(schedule, 3, SHAPE)
    with bench_host.nothing_runs(kernel) as library:
        for rank in range(3):
            forward, backward = bench_host.calls(both, rank, SHAPE, kernel)
            for call, plan in ((forward, both[0]), (backward, both[1])):
                library.num_calls = 0
                call()
                steps = plan.steps[rank]
                merges = sum(len(step.merges) for step in steps)
                assert library.num_calls >= merges + sum(1 for step in steps if step.tasks)


def test_tapes_make_the_calls(monkeypatch):
    """From C++, so that Python sees none."""
    made = []
    write = tape._write

    def remembering(*args):
        made.append(write(*args))
        return made[-1]

    monkeypatch.setattr(tape, "_write", remembering)
    both = bench_host.plans("balanced", 3, SHAPE)
    with bench_host.nothing_runs("tape") as library:
        for rank in range(3):
            for call in bench_host.calls(both, rank, SHAPE, "tape"):
                call(), call()
    assert len(made) == 6 and None not in made
    assert library.num_calls == 0


def test_kernels_are_as_before_afterwards():
    before = dict(blocks._KERNELS)
    with bench_host.nothing_runs("none"):
        assert before != blocks._KERNELS
    assert before == blocks._KERNELS
    plan, _ = bench_host.plans("balanced", 1, SHAPE)
    q, k, v = (torch.ones(8, 1, heads, 64) for heads in (4, 2, 2))
    transport = reference.NoTransport()
    out, _ = reference.forward(plan, 0, q, k, v, scale=1.0, kernel="cpu", transport=transport)
    assert torch.allclose(out, torch.ones(()))
