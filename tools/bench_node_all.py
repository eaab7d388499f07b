"""tools/bench_node.py all: build, check and measure everything within a time, part by part."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_ranks import ROOT, Mps, Node

TOOLS = ROOT / "tools"
KILL_AFTER_S = 20.0  # What a part may take beyond its budget, to write and to end.
END_S = 10.0  # And then to end its ranks.
SHARES = {"build": 0.15, "check": 0.1, "attention": 0.4, "overlap": 0.1, "train": 0.25}
NEED_GPUS = ("check", "overlap")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured on a kind of machine, most important first.

    Attributes:
        tokens: per rank.
        train_tokens: of the whole sequence.
    """

    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[str, ...]
    head_dim: int
    train_tokens: tuple[int, ...]
    train_shape: str

    @staticmethod
    def of(node: Node) -> Sizes:
        """For several GPUs, for one that is shared, for CPU ranks."""
        if node.num_gpus > 1:
            ranks = tuple(n for n in (8, 4, 2) if n <= node.num_gpus)
            tokens = tuple(n * ranks[0] for n in (8192, 32768))
            heads = ("64/8", "32/8")
            return Sizes(ranks, (8192, 16384, 32768), heads, 128, tokens, "llama-8b-layers")
        if node.num_gpus == 1:
            return Sizes((4, 8, 2), (8192,), ("32/8",), 128, (32768,), "llama-8b-2-layers")
        return Sizes((2,), (64,), ("4/2",), 16, (64,), "tiny")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part went."""

    part: str
    went: str
    seconds: float

    @property
    def is_bad(self) -> bool:
        return self.went not in ("done", "left out")


def run(
    node: Node, out: Path, budget_s: float, parts: Sequence[str] = tuple(SHARES)
) -> list[Outcome]:
    """Run the parts, each in processes of its own; a part's unspent time goes to the later ones."""
    end = time.monotonic() + budget_s
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for idx, part in enumerate(parts):
        share = SHARES[part] / sum(SHARES[left] for left in parts[idx:])
        begun = time.monotonic()
        part_s = max(1.0, share * (end - begun))
        print(f"\n== {part}, at most {part_s:.0f} s", flush=True)
        if part in NEED_GPUS and node.num_gpus == 0:
            print("left out: it moves GPU memory, and there is no GPU", flush=True)
            went = "left out"
        else:
            went = _PARTS[part](node, out, part_s)
        outcomes.append(Outcome(part, went, time.monotonic() - begun))
    print("\n" + "\n".join(f"{o.part:10} {o.went:12} {o.seconds:6.0f} s" for o in outcomes))
    return outcomes


def _build(node: Node, out: Path, part_s: float) -> str:
    return _command([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], part_s)


def _check(node: Node, out: Path, part_s: float) -> str:
    command = [str(TOOLS / "check_native.py"), "--num-cases", "2"]
    return _scripts(node, Sizes.of(node).ranks[0], command, part_s)


def _overlap(node: Node, out: Path, part_s: float) -> str:
    sizes = Sizes.of(node)
    query, kv = sizes.heads[0].split("/")
    command = [str(TOOLS / "bench_overlap.py"), "--backward", "--ctas", "2", "--repeats", "3"]
    command += ["--tokens", str(sizes.tokens[0]), "--heads", query, "--kv-heads", kv]
    return _scripts(node, sizes.ranks[0], command, part_s)


def _attention(node: Node, out: Path, part_s: float) -> str:
    sizes = Sizes.of(node)
    command = ["--tokens", *map(str, sizes.tokens), "--heads", *sizes.heads]
    command += ["--head-dim", str(sizes.head_dim), "--trace", str(out / "traces")]
    if node.num_gpus == 0:
        command += ["--comms", "torch", "--kernels", "cpu"]
    return _own("attention", node, out, part_s, command)


def _train(node: Node, out: Path, part_s: float) -> str:
    sizes = Sizes.of(node)
    command = ["--tokens", *map(str, sizes.train_tokens), "--shape", sizes.train_shape]
    if node.num_gpus:
        command += ["--options", "comm=auto"]
    else:
        command += ["--rows", "stock-tp-full", "ours-remat"]  # no stock CP without GPUs
    return _own("train", node, out, part_s, command)


_PARTS: dict[str, Callable[[Node, Path, float], str]] = {
    "build": _build,
    "check": _check,
    "attention": _attention,
    "overlap": _overlap,
    "train": _train,
}


def _own(name: str, node: Node, out: Path, part_s: float, command: list[str]) -> str:
    """A part that is a command of bench_node.py, which keeps to a budget itself."""
    ranks = map(str, Sizes.of(node).ranks)
    library = ["--nccl-library", node.nccl_library] if node.nccl_library else []
    full = [sys.executable, str(TOOLS / "bench_node.py"), name, "--ranks", *ranks, *command]
    full += [*library, "--connections", str(node.connections), "--budget-s", f"{part_s:.0f}"]
    full += ["--json", str(out / f"{name}.json"), "--png", str(out / f"{name}.png")]
    return _command(full, part_s + KILL_AFTER_S)


def _command(command: Sequence[str], limit_s: float) -> str:
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return "done" if process.wait(limit_s) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "cut off"
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    """Nothing of it may hold GPU memory when the next part begins. First as by Ctrl-C, so that it
    ends its ranks and MPS itself; then what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _scripts(node: Node, num_ranks: int, command: Sequence[str], limit_s: float) -> str:
    """A script that is started once per rank; rank 0's output, and what a failing rank said."""
    end = time.monotonic() + limit_s
    with Mps(node.shares_gpu(num_ranks)):
        logs = [tempfile.TemporaryFile("w+") for _ in range(num_ranks)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for environment, log in zip(node.environments(num_ranks), logs, strict=True)
        ]
        codes = [_exit_code(process, end) for process in processes]
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if rank == 0 or code:
            log.seek(0)
            print(f"rank {rank}:\n{log.read().strip()}", flush=True)
        log.close()
    if None in codes:
        return "cut off"
    return "failed" if any(codes) else "done"


def _exit_code(process: subprocess.Popen, end: float) -> int | None:
    """None: it had to be killed."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
