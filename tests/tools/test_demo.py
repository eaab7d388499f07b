"""The demo around its training runs, which CI's `make demo` trains for real."""

import json
import sys
from pathlib import Path

import demo
import pytest
from compare_runs import Curve
from demo import Layout, Run


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, Layout(2, 2, "fp32", "CPU")),
        (1, Layout(1, 1, "bf16", "GPU")),
        (2, Layout(1, 2, "bf16", "GPU")),
        (3, Layout(1, 3, "bf16", "GPU")),
        (4, Layout(2, 2, "bf16", "GPU")),
        (7, Layout(1, 7, "bf16", "GPU")),
        (8, Layout(2, 4, "bf16", "GPU")),
    ],
)
def test_every_gpu_is_used(num_gpus, expected):
    layout = demo.choose_layout(num_gpus)
    assert layout == expected
    assert layout.num_ranks == (num_gpus or demo.NUM_CPU_RANKS)


def arguments_of(name: str, layout: Layout, tmp_path: Path) -> list[str]:
    args = demo.parse_args(["--out", str(tmp_path)])
    return list(demo.make_run(name, layout, args, tmp_path / "text").command)


def test_the_runs_differ_only_in_what_is_compared(tmp_path):
    layout = Layout(2, 2, "fp32", "CPU")
    ours = arguments_of(demo.DISTFLASH, layout, tmp_path)
    stock = arguments_of(demo.STOCK, Layout(2, 1, "fp32", "CPU"), tmp_path)
    assert ours[ours.index("--nproc-per-node") + 1] == "4"
    assert ours.pop(ours.index("--distflash-attn")) and "--distflash-attn" not in stock
    differing = {ours[idx - 1] for idx in range(len(stock)) if ours[idx] != stock[idx]}
    assert differing == {"--nproc-per-node", "--context-parallel-size", "--tensorboard-dir"}


def test_bf16_on_gpus_only(tmp_path):
    assert "--bf16" in arguments_of(demo.STOCK, Layout(1, 2, "bf16", "GPU"), tmp_path)
    assert "--bf16" not in arguments_of(demo.STOCK, Layout(2, 2, "fp32", "CPU"), tmp_path)


def test_the_environment_of_the_user_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert demo.make_environment(Layout(2, 2, "fp32", "CPU"))["OMP_NUM_THREADS"] == "3"


def test_shows_one_short_line_per_iteration(capsys):
    demo.show_progress("> building the datasets ...\n")
    demo.show_progress(
        " [2026-01-01 10:00:00.000000] iteration        7/      40 | consumed samples:           14"
        " | elapsed time per iteration (ms): 6738.0 | learning rate: 7.500000E-04 | global batch"
        " size:     2 | lm loss: 5.771599E+00 | loss scale: 1.0 | grad norm: 11.516 | number of"
        " skipped iterations:   0 | number of nan iterations:   0 |\n"
    )
    shown = capsys.readouterr().out
    assert shown == "  iteration  7/40   loss 5.7716   grad norm 11.516   6.7 s\n"


def python_run(folder: Path, code: str) -> Run:
    command = (sys.executable, "-c", code)
    return Run("mine", Layout(1, 1, "fp32", "CPU"), command, folder)


def test_a_run_is_logged_whole(tmp_path):
    seconds = demo.train(python_run(tmp_path / "mine", "print('out'); import sys; sys.exit(0)"))
    assert (tmp_path / "mine" / "log.txt").read_text() == "out\n"
    assert "print" in (tmp_path / "mine" / "command.txt").read_text()
    assert 0 < seconds < 60


def test_a_failed_run_shows_its_error_and_names_its_log(tmp_path, capsys):
    code = "print('before'); raise ValueError('heads are not divisible')"
    with pytest.raises(RuntimeError, match=r"mine run failed with exit status 1.*log\.txt"):
        demo.train(python_run(tmp_path / "mine", code))
    assert capsys.readouterr().err == "  ValueError: heads are not divisible\n"


def test_an_error_without_words_is_shown_with_its_code(tmp_path, capsys):
    with pytest.raises(RuntimeError):
        demo.train(python_run(tmp_path / "mine", "assert 1 > 2"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "  AssertionError"
    assert any('File "<string>", line 1' in line for line in lines[:-1])


def test_clearing_touches_only_what_a_demo_writes(tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("keep")
    (tmp_path / demo.STOCK).mkdir()
    (tmp_path / "summary.json").write_text("{}")
    demo.clear(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("diff", [0.0, 0.5])
def test_report(tmp_path, monkeypatch, capsys, diff):
    curves = {
        name: Curve(name, (1, 2, 3, 4), (5.0 + shift, 4.0, 3.5, 3.25), (1.0, 1.0, 1.0, 1.0))
        for name, shift in ((demo.DISTFLASH, diff), (demo.STOCK, 0.0))
    }
    monkeypatch.setattr(demo.compare_runs, "read_curve", lambda name, folder: curves[name])
    runs = [
        Run(demo.DISTFLASH, Layout(2, 2, "fp32", "CPU"), (), tmp_path),
        Run(demo.STOCK, Layout(2, 1, "fp32", "CPU"), (), tmp_path),
    ]
    problems = demo.report(runs, [10.04, 20.0], tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert len(problems) == (diff > 0)
    assert summary["agree"] == (diff == 0)
    assert summary["max_loss_diff"] == diff
    assert summary["parallel"] == {"tensor": 2, "context": 2}
    assert summary["seconds"] == 30.0
    assert summary["iterations"] == 4
    assert "iteration" in capsys.readouterr().out


def test_too_few_iterations_are_refused(capsys):
    with pytest.raises(SystemExit):
        demo.parse_args(["--iterations", "1"])
    assert "--iterations must be at least 2" in capsys.readouterr().err
