"""The comparison of two runs: what it reads, measures, accepts and refuses."""

import dataclasses
import json
import math
import random
from pathlib import Path

import compare_runs
import pytest
from compare_runs import Comparison, Curve


def falling_curve(name: str, num_iterations: int = 20) -> Curve:
    """A loss that falls with noise, and some gradient norms; fresh in every test run."""
    losses = [5.0 * 0.9**idx + random.uniform(0, 0.01) for idx in range(num_iterations)]
    grad_norms = [random.uniform(0.5, 2.0) for _ in range(num_iterations)]
    return Curve(name, tuple(range(1, num_iterations + 1)), tuple(losses), tuple(grad_norms))


def shifted(curve: Curve, idx: int, loss: float = 0.0, grad_norm_factor: float = 1.0) -> Curve:
    """The same curve with one iteration moved."""
    losses, grad_norms = list(curve.losses), list(curve.grad_norms)
    losses[idx] += loss
    grad_norms[idx] *= grad_norm_factor
    return dataclasses.replace(
        curve, name="other", losses=tuple(losses), grad_norms=tuple(grad_norms)
    )


def write_log(folder: Path, curve: Curve, tags: tuple[str, ...] | None = None) -> None:
    """The curve as Megatron logs it."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for iteration, loss, grad_norm in zip(
            curve.iterations, curve.losses, curve.grad_norms, strict=True
        ):
            for tag, value in (("lm loss", loss), ("grad-norm", grad_norm)):
                if tags is None or tag in tags:
                    writer.add_scalar(tag, value, iteration)
                    writer.add_scalar(f"{tag} vs samples", value, iteration * 8)


# ---------------------------------------------------------------------------- reading


def test_reads_what_was_logged(tmp_path):
    curve = falling_curve("run", num_iterations=1200)  # more than TensorBoard keeps by default
    write_log(tmp_path, curve)
    read = compare_runs.read_curve("run", tmp_path)
    assert read.iterations == curve.iterations
    assert read.losses == pytest.approx(curve.losses, rel=1e-7)  # logged as float32
    assert read.grad_norms == pytest.approx(curve.grad_norms, rel=1e-7)


def test_no_log(tmp_path):
    with pytest.raises(ValueError, match="holds no TensorBoard log of the run 'mine'"):
        compare_runs.read_curve("mine", tmp_path)


def test_log_without_gradient_norms(tmp_path):
    write_log(tmp_path, falling_curve("mine"), tags=("lm loss",))
    with pytest.raises(ValueError, match="'mine' logged no grad-norm"):
        compare_runs.read_curve("mine", tmp_path)


def test_logs_of_two_runs_in_one_folder(tmp_path):
    for name in ("first", "second"):
        write_log(tmp_path / name, falling_curve(name))
        for log in (tmp_path / name).iterdir():
            log.rename(tmp_path / f"{log.name}.{name}")
    with pytest.raises(ValueError, match="more than one run"):
        compare_runs.read_curve("mine", tmp_path)


def test_runs_of_different_length():
    with pytest.raises(ValueError, match=r"'a' logged 20 \(1 to 20\), 'b' 15 \(1 to 15\)"):
        compare_runs.compare(falling_curve("a"), falling_curve("b", num_iterations=15))


# ---------------------------------------------------------------------------- judging


def test_equal_runs_have_no_problems():
    curve = falling_curve("a")
    assert compare_runs.find_problems(Comparison(curve, curve), loss_tolerance=0.0) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_difference_counts(sign):
    curve = falling_curve("a")
    comparison = Comparison(shifted(curve, 13, loss=sign * 2e-4), curve)
    (problem,) = compare_runs.find_problems(comparison, loss_tolerance=1e-4)
    assert "differ by 2.00e-04 in iteration 14" in problem
    assert "1 of 20 iterations" in problem
    assert compare_runs.find_problems(comparison, loss_tolerance=3e-4) == []


def test_nan_is_a_difference():
    curve = falling_curve("a")
    comparison = Comparison(shifted(curve, 3, loss=math.nan), curve)
    assert "in iteration 4" in compare_runs.find_problems(comparison, loss_tolerance=1e-4)[0]


def test_a_loss_that_does_not_fall():
    curve = falling_curve("a")
    rising = dataclasses.replace(curve, losses=curve.losses[::-1])
    (problem,) = compare_runs.find_problems(Comparison(rising, rising), loss_tolerance=1e-4)
    assert "the loss of a does not fall" in problem


# ---------------------------------------------------------------------------- reporting


def test_summary_numbers():
    curve = falling_curve("a")
    other = shifted(shifted(curve, 5, loss=3e-5), 9, loss=1e-5, grad_norm_factor=1.25)
    summary = compare_runs.summarize(Comparison(other, curve))
    assert summary["iterations"] == 20
    assert summary["loss_first"] == other.losses[0]
    assert summary["loss_last"] == other.losses[-1]
    assert summary["max_loss_diff"] == pytest.approx(3e-5)
    assert summary["max_grad_norm_rel_diff"] == pytest.approx(0.25)


def test_table_has_every_number():
    curve = falling_curve("a-long-name-of-a-run")
    other = shifted(curve, 2, loss=3e-5, grad_norm_factor=1.5)
    lines = compare_runs.format_table(Comparison(other, curve)).splitlines()
    assert len(lines) == 2 + 20
    assert len({len(line) for line in lines}) == 1
    assert "a-long-name-of-a-run" in lines[1]
    cells = lines[2 + 2].split()
    assert cells[0] == "3"
    expected = (other.losses[2], curve.losses[2], 3e-5, other.grad_norms[2], curve.grad_norms[2])
    assert [float(cell) for cell in cells[1:6]] == pytest.approx(expected, abs=5e-7)
    assert float(cells[6]) == pytest.approx(0.5)


def test_command_line_writes_picture_and_summary(tmp_path, capsys):
    curve = falling_curve("a")
    write_log(tmp_path / "a", curve)
    write_log(tmp_path / "b", curve)
    outputs = ["--png", str(tmp_path / "loss.png"), "--json", str(tmp_path / "summary.json")]
    compare_runs.main([f"ours={tmp_path / 'a'}", f"theirs={tmp_path / 'b'}", *outputs])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "summary.json").read_text())["max_loss_diff"] == 0.0
    assert "theirs" in capsys.readouterr().out


def test_command_line_fails_when_runs_differ(tmp_path):
    curve = falling_curve("a")
    write_log(tmp_path / "a", curve)
    write_log(tmp_path / "b", shifted(curve, 1, loss=0.5))
    with pytest.raises(SystemExit, match="differ by 5.00e-01 in iteration 2"):
        compare_runs.main([f"ours={tmp_path / 'a'}", f"theirs={tmp_path / 'b'}"])
