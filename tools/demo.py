#!/usr/bin/env python
"""The demonstration behind `make demo`: one GPT trained twice, and the two runs compared.

The first run splits every sequence over ranks with --distflash-attn, the second is stock Megatron
without context parallelism: same seed, same data, same tensor parallel size. Both train through
megatron.training.pretrain, and end with the same losses up to rounding.

Without a GPU the ranks are processes on the CPU and train in fp32; with GPUs every GPU is a rank
and trains in bf16. Writes loss.png, summary.json and each run's log and command to --out.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import compare_runs

ROOT = Path(__file__).resolve().parent.parent
DISTFLASH, STOCK = "distflash", "stock"
NUM_CPU_RANKS = 4

# In fp32 rounding alone leaves the losses of the default runs within 1e-6; a wrongly cut rotary
# embedding, a mistake that raises no error, shows as 1.7e-4 in the first iteration. The bf16
# tolerance is an estimate from its rounding step, 2^-8 of a value, and not yet measured on GPUs.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}

# Folders of the standard library without readable source: tests full of generated data, character
# tables, and what is installed beside the library.
STDLIB_EXCLUDE = ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages")

MODEL = {
    "--num-layers": 4,
    "--hidden-size": 128,
    "--ffn-hidden-size": 384,
    "--num-attention-heads": 8,
    "--group-query-attention": None,
    "--num-query-groups": 4,
    "--position-embedding-type": "rope",
    "--swiglu": None,
    "--normalization": "RMSNorm",
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--init-method-std": 0.02,
    # Layers in plain PyTorch: they need neither Transformer Engine nor apex.
    "--transformer-impl": "local",
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-rope-fusion": None,
    "--no-create-attention-mask-in-dataloader": None,
}
TRAINING = {
    "--micro-batch-size": 1,
    "--global-batch-size": 2,
    "--lr": 1.5e-3,
    "--min-lr": 1.5e-4,
    "--lr-decay-style": "cosine",
    "--lr-warmup-fraction": 0.1,
    "--weight-decay": 0.1,
    "--adam-beta2": 0.95,
    "--clip-grad": 1.0,
    "--seed": 1234,
    "--split": "100,0,0",
    "--eval-iters": 0,
    "--log-interval": 1,
    "--tensorboard-log-interval": 1,
}
BYTE_TOKENIZER = {
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 257,
    "--make-vocab-size-divisible-by": 16,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one run is spread over ranks."""

    tensor: int
    context: int
    precision: str
    device: str

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context

    def __str__(self) -> str:
        return (
            f"tensor parallel {self.tensor} x context parallel {self.context}: "
            f"{self.num_ranks} {self.device} rank{'s' if self.num_ranks > 1 else ''}, "
            f"{self.precision}"
        )


def choose_layout(num_gpus: int) -> Layout:
    """All GPUs, split two ways when their number allows; four CPU ranks when there is none."""
    if num_gpus == 0:
        return Layout(tensor=2, context=NUM_CPU_RANKS // 2, precision="fp32", device="CPU")
    tensor = 2 if num_gpus >= 4 and num_gpus % 2 == 0 else 1
    return Layout(tensor, num_gpus // tensor, precision="bf16", device="GPU")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---------------------------------------------------------------------------- data


def prepare_data(text: Path | None, prefix: Path) -> None:
    """Write byte-level training data: the given text, or the standard library's source."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_text.py"), "--overwrite"]
    command += ["--output-prefix", str(prefix)]
    if text is None:
        stdlib = sysconfig.get_paths()["stdlib"]
        command += ["--input", stdlib, "--glob", "*.py", "--exclude", *STDLIB_EXCLUDE]
    else:
        command += ["--input", str(text)]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise RuntimeError("the training data could not be prepared; see above")


# ---------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: what to start and where it writes."""

    name: str
    layout: Layout
    command: tuple[str, ...]
    folder: Path

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"


def make_run(name: str, layout: Layout, args: argparse.Namespace, data_prefix: Path) -> Run:
    """The run called `name`; the two differ in --distflash-attn and the context parallel size."""
    folder = args.out / name
    flags = MODEL | TRAINING | BYTE_TOKENIZER
    flags |= {
        "--tensor-model-parallel-size": layout.tensor,
        "--context-parallel-size": layout.context,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.seq_length,
        "--train-iters": args.iterations,
        "--eval-interval": args.iterations,
        "--data-path": data_prefix,
        "--data-cache-path": data_prefix.parent / "cache",
        "--tensorboard-dir": folder / "tensorboard",
    }
    if layout.precision == "bf16":
        flags["--bf16"] = None
    if name == DISTFLASH:
        flags["--distflash-attn"] = None
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(layout.num_ranks), "-m", "megatron_distflash.run"]
    script = ["examples/pretrain_gpt.py"]
    script += [str(part) for flag in flags.items() for part in flag if part is not None]
    return Run(name, layout, (sys.executable, *launcher, *script), folder)


def make_environment(layout: Layout) -> dict[str, str]:
    """Settings for the ranks of one run; what the user's environment says comes first."""
    settings = {"PYTHONUNBUFFERED": "1"}
    if layout.device == "GPU":
        # Megatron asks for it under tensor parallelism: collectives keep the order of launches.
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    else:
        num_cores = len(os.sched_getaffinity(0))
        settings["OMP_NUM_THREADS"] = str(max(1, num_cores // layout.num_ranks))
        # Stock attention allocates its score matrix anew in every layer. Keeping freed memory
        # spares the kernel from zeroing those pages each time: half of a run's time.
        settings["MALLOC_MMAP_THRESHOLD_"] = settings["MALLOC_TRIM_THRESHOLD_"] = str(4 << 30)
    return settings | os.environ


ITERATION_LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/ *(?P<total>\d+) \|.*"
    r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|.*"
    r"lm loss: (?P<loss>\S+) \|.*grad norm: (?P<grad_norm>\S+) \|"
)


def train(run: Run) -> float:
    """Run to the end, showing each iteration on screen and everything in the log. Seconds taken.

    Raises RuntimeError, with the end of the log on screen, when the run fails.
    """
    run.folder.mkdir(parents=True)
    log_path = run.folder / "log.txt"
    (run.folder / "command.txt").write_text(shlex.join(run.command) + "\n")
    print(f"\n{run.name}: {run.layout}; log: {show_path(log_path)}")
    started = time.monotonic()
    process = subprocess.Popen(
        run.command, cwd=ROOT, env=make_environment(run.layout), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        with log_path.open("w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                show_progress(line)
        status = process.wait()
    finally:
        process.terminate()  # only matters when this process is interrupted
    if status != 0:
        show_failure(log_path)
        raise RuntimeError(
            f"the {run.name} run failed with exit status {status}; its log is "
            f"{show_path(log_path)}, its command is in {show_path(run.folder / 'command.txt')}"
        )
    return time.monotonic() - started


def show_progress(line: str) -> None:
    """Shorten Megatron's line about an iteration to what fits a terminal.

    The loss in its second line is the mean of the first two iterations; the report at the end has
    each iteration's own, from TensorBoard.
    """
    match = ITERATION_LINE.search(line)
    if match:
        width = len(match["total"])
        print(
            f"  iteration {match['iteration']:>{width}}/{match['total']}   "
            f"loss {float(match['loss']):.4f}   grad norm {float(match['grad_norm']):.3f}   "
            f"{float(match['ms']) / 1e3:.1f} s",
            flush=True,
        )


ERROR_LINE = re.compile(r"^(\[rank\d+\]: *)?[\w.]*(Error|Exception)(?P<message>: .+)?$")


def show_failure(log_path: Path) -> None:
    """Print what a failed run said: the first error of any rank, or else the end of its log."""
    lines = log_path.read_text().splitlines()
    shown = lines[-20:]
    for idx, line in enumerate(lines):
        match = ERROR_LINE.match(line)
        if match:  # an error that says nothing needs the code that raised it
            shown = [line] if match["message"] else lines[max(0, idx - 4) : idx + 1]
            break
    for line in shown:
        print(f"  {line}", file=sys.stderr)


def show_path(path: Path) -> str:
    """Relative to here, when it is below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


# ---------------------------------------------------------------------------- report


def report(runs: Sequence[Run], seconds: Sequence[float], out: Path) -> list[str]:
    """Table, picture and summary of the finished runs; returns what is wrong with them."""
    ours, reference = (compare_runs.read_curve(run.name, run.tensorboard) for run in runs)
    comparison = compare_runs.compare(ours, reference)
    layout = runs[0].layout
    tolerance = LOSS_TOLERANCES[layout.precision]
    problems = compare_runs.find_problems(comparison, tolerance)
    print("\n" + compare_runs.format_table(comparison))
    title = f"Megatron GPT, {layout.precision}: {ours.name} {describe(layout)}, "
    title += f"{reference.name} {describe(runs[1].layout)}"
    compare_runs.plot(comparison, out / "loss.png", tolerance, title)
    summary = compare_runs.summarize(comparison) | {
        "loss_tolerance": tolerance,
        "agree": not problems,
        "parallel": {"tensor": layout.tensor, "context": layout.context},
        "ranks": layout.num_ranks,
        "device": layout.device,
        "precision": layout.precision,
        "seconds": round(sum(seconds), 1),
        "seconds_per_run": {
            run.name: round(taken, 1) for run, taken in zip(runs, seconds, strict=True)
        },
        "versions": package_versions(),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(
        f"\nlargest difference: loss {summary['max_loss_diff']:.2e} (tolerance {tolerance:g}), "
        f"gradient norm {summary['max_grad_norm_rel_diff']:.2e} relative\n"
        f"wrote {show_path(out / 'loss.png')} and {show_path(out / 'summary.json')}"
    )
    return problems


def describe(layout: Layout) -> str:
    return f"TP{layout.tensor} x CP{layout.context}"


def package_versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "megatron-core")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


# ---------------------------------------------------------------------------- command line


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--iterations", type=int, default=40, help="of each run (default: %(default)s)")
    add("--seq-length", type=int, default=2048, help="tokens (default: %(default)s)")
    add("--text", type=Path, help="folder or file to train on (default: Python's own source)")
    add("--out", type=Path, default=ROOT / "out" / "demo",
        help="folder for the results; what an earlier demo left there is replaced")  # fmt: skip
    args = parser.parse_args(argv)
    if args.iterations < 2:
        parser.error(f"--iterations must be at least 2, to see a loss fall; got {args.iterations}")
    args.out = args.out.resolve()
    args.text = args.text and args.text.resolve()
    return args


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def clear(out: Path) -> None:
    """Make room for a new demo, touching only what a demo writes."""
    for name in ("data", DISTFLASH, STOCK):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("loss.png", "summary.json"):
        (out / name).unlink(missing_ok=True)


def run_demo(args: argparse.Namespace) -> list[str]:
    """Data, both runs, report. Returns what is wrong with the runs, a sentence each."""
    layout = choose_layout(count_gpus())
    alone = Layout(layout.tensor, 1, layout.precision, layout.device)
    # Megatron wants two equal chunks per context-parallel rank.
    args.seq_length = round_up(args.seq_length, 2 * layout.context)
    if layout.device == "CPU":
        print("No GPU was found: training on CPU ranks over gloo, whose timings mean nothing.")
    clear(args.out)
    data_prefix = args.out / "data" / "text"
    prepare_data(args.text, data_prefix)
    runs = [make_run(DISTFLASH, layout, args, data_prefix)]
    runs += [make_run(STOCK, alone, args, data_prefix)]
    return report(runs, [train(run) for run in runs], args.out)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        problems = run_demo(args)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"demo failed: {error}")
    if problems:
        sys.exit("demo failed: " + "; ".join(problems))
    print("the two runs agree and the loss falls")


if __name__ == "__main__":
    main()
