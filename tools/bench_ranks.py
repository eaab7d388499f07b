"""Starts the ranks of a benchmark as processes of one machine, and talks with them.

A rank has a GPU of its own where there are enough. Where there is one GPU for all, each rank gets
its share of the multiprocessors through CUDA's multi-process service (MPS) and all run at once: a
node of small GPUs. Several NCCL ranks on one GPU need NCCL 2.30 or newer (``nccl_library``).
Without a GPU the ranks are CPU processes over gloo.

A worker says that it is ready and then answers requests on stdin, one JSON object a line, on
stdout; what libraries print goes to its log.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG_TAIL_LINES = 15
START_S = 300.0  # Imports of many processes at once.
CLOSE_S = 10.0
MPS_ANSWER_S = 4.0
# How long the others have to say what they saw after one rank died; and after one answered that it
# failed, since they may wait for it for ever.
GRACE_S = 5.0
FAILED_GRACE_S = 20.0

GOOD = ("ready", "ok")  # A worker's status where nothing went wrong.

# Megatron insists on one connection with context or tensor parallelism on Hopper and older GPUs, so
# that kernels start in the order of their launches.
MEGATRON_CONNECTIONS = 1
SHARED_GPU_CTAS = 2  # NCCL's CTAs per communicator where ranks share one GPU.


class RanksFailed(RuntimeError):
    """A rank died or did not answer; its process group is of no use any more.

    Attributes:
        answers: those of the ranks that did answer.
    """

    def __init__(self, message: str, answers: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.answers = list(answers)


@dataclass(frozen=True, slots=True)
class Node:
    """The machine's GPUs and how ranks are put on them.

    Attributes:
        num_gpus: 0: the ranks run on the CPU.
        nccl_library: loaded into every rank in place of the NCCL that torch brings.
        connections: CUDA_DEVICE_MAX_CONNECTIONS of every rank.
    """

    num_gpus: int
    nccl_library: str | None = None
    connections: int = MEGATRON_CONNECTIONS

    def shares_gpu(self, num_ranks: int) -> bool:
        return 0 < self.num_gpus < num_ranks

    def share_percent(self, num_ranks: int) -> int:
        """Of the multiprocessors, that each rank gets.

        Rounded up, since MPS rounds the multiprocessors down to an even number: of 132, 12% are 14
        and would leave eight ranks 112, with 13% they have 128.
        """
        return math.ceil(100 / num_ranks) if self.shares_gpu(num_ranks) else 100

    def environments(self, num_ranks: int) -> list[dict[str, str]]:
        """What each rank of a group finds in its environment besides what is there already.

        Raises:
            ValueError: there are several GPUs, but fewer than ranks.
        """
        if 1 < self.num_gpus < num_ranks:
            raise ValueError(f"{num_ranks} ranks need as many GPUs, or just one to share")
        shared = self._common() | {"WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(_free_port())}
        if self.shares_gpu(num_ranks):
            shared |= {
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.share_percent(num_ranks)),
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                "NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS", str(SHARED_GPU_CTAS)),
            }
        device = (lambda rank: 0) if self.shares_gpu(num_ranks) else (lambda rank: rank)
        return [
            shared | {"RANK": str(rank), "LOCAL_RANK": str(device(rank))}
            for rank in range(num_ranks)
        ]

    def alone(self) -> dict[str, str]:
        """The environment of a process that has the whole first GPU while it works."""
        only = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        return self._common() | only | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}

    def about(self) -> dict[str, int]:
        """What a result has to say of how the ranks ran."""
        return {"num_gpus": self.num_gpus, "CUDA_DEVICE_MAX_CONNECTIONS": self.connections}

    def _common(self) -> dict[str, str]:
        common = worker_environment() | {
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            "CUDA_DEVICE_MAX_CONNECTIONS": str(self.connections),
            "NCCL_NVLS_ENABLE": "0",
        }
        if self.nccl_library:
            common["LD_PRELOAD"] = self.nccl_library
        return common

    @staticmethod
    def here(nccl_library: str | None = None, connections: int = MEGATRON_CONNECTIONS) -> Node:
        """This machine, asked without taking a GPU. CUDA_VISIBLE_DEVICES counts."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            num_gpus = len([name for name in visible.split(",") if name.strip()])
        elif shutil.which("nvidia-smi"):
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
            num_gpus = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
        else:
            num_gpus = 0
        return Node(num_gpus, nccl_library, connections)


def worker_environment() -> dict[str, str]:
    """What every worker finds in its environment."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # One small kernel after the other is compiled: no pool of compilers for each.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


class Mps:
    """CUDA's multi-process service while the block runs; processes started in it share the GPU.

    Does nothing where it is not needed.
    """

    def __init__(self, needed: bool) -> None:
        self._needed = needed

    def __enter__(self) -> Mps:
        if self._needed:
            self._directory = tempfile.mkdtemp(prefix="mps-")
            for name in ("PIPE", "LOG"):
                os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = self._directory
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
            time.sleep(1.0)  # It answers nobody before.
        return self

    def __exit__(self, *_: object) -> None:
        if self._needed:
            self._quit()
            for name in ("PIPE", "LOG"):
                del os.environ[f"CUDA_MPS_{name}_DIRECTORY"]
            shutil.rmtree(self._directory, ignore_errors=True)

    def _quit(self) -> None:
        """Ask the daemon to end. It was seen to wait for clients that were gone already; then it is
        ended with its servers, which are nobody else's: the pipes' folder is new."""
        daemon = Path(self._directory, "nvidia-cuda-mps-control.pid")
        pids = [int(daemon.read_text())] if daemon.exists() else []
        servers = self._tell("get_server_list")
        pids += [int(pid) for pid in (servers or "").split() if pid.isdigit()]
        if self._tell("quit -t 1") is None:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _tell(command: str) -> str | None:
        """The daemon's answer; None: it gave none in time."""
        control = ["nvidia-cuda-mps-control"]
        try:
            done = subprocess.run(
                control, input=f"{command}\n", text=True, capture_output=True, timeout=MPS_ANSWER_S
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout


class Ranks:
    """The processes of one group. They import at once, and take a GPU at their first request.

    Args:
        command: a Python script and its arguments, the same for every rank.
        environments: one per rank, added to this process's.
        timeout_s: the longest that an answer may take, once they have imported.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[dict[str, str]], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._processes = [_Process(command, environment) for environment in environments]
        self._ready = False

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    def ask(self, request: dict[str, Any], timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The ranks' answers to one request, by rank.

        Args:
            timeout_s: less than the group's own, if given.

        Raises:
            RanksFailed: a rank died or gave no answer in time; all are killed then.
        """
        return self.ask_each([request] * self.num_ranks, timeout_s)

    def ask_each(
        self, requests: Sequence[dict[str, Any]], timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """As ``ask``, with a request of its own for every rank."""
        self.wait_ready()
        for process, request in zip(self._processes, requests, strict=True):
            process.send(request)
        return self._answers(self._timeout_s if timeout_s is None else timeout_s)

    def wait_ready(self) -> None:
        """Until every rank has imported what it needs."""
        if not self._ready:
            self._answers(START_S)
            self._ready = True

    def close(self) -> None:
        """Wait until the processes are gone and their GPU memory with them."""
        for process in self._processes:
            process.end_input()
        for process in self._processes:
            process.close()

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        answers: list[dict[str, Any] | None] = [None] * self.num_ranks
        end = time.monotonic() + timeout_s
        lost: list[str] = []
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.output, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    answer = answers[key.data] = self._processes[key.data].read()
                    if answer is None:
                        lost.append(f"rank {key.data} {self._processes[key.data].epitaph()}")
                        end = min(end, time.monotonic() + GRACE_S)
                    elif answer.get("status", "ok") not in GOOD:
                        end = min(end, time.monotonic() + FAILED_GRACE_S)
        if None not in answers:
            return answers
        silent = [rank for rank, answer in enumerate(answers) if answer is None]
        for rank, answer in enumerate(answers):
            if answer is not None and answer.get("status", "ok") not in GOOD:
                lost.append(f"rank {rank} failed ({answer.get('message', answer['status'])})")
        if not lost:
            lost = [f"rank {r} gave no answer in {timeout_s:.0f} s" for r in silent]
            lost[0] += self._processes[silent[0]].log_tail()
        self.kill()
        raise RanksFailed("\n".join(lost), [answer for answer in answers if answer is not None])

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()


class _Process:
    """One worker, its two pipes and its log."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in ``close``)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | environment,
            bufsize=0,
        )
        self.output = self._process.stdout

    def send(self, request: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return  # ``read`` finds out how it died.

    def read(self) -> dict[str, Any] | None:
        """Its next answer; None if it is dead."""
        line = self.output.readline()
        return json.loads(line) if line else None

    def epitaph(self) -> str:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"closed its output and did not end{self.log_tail()}"
        return f"died (exit code {self._process.returncode}){self.log_tail()}"

    def log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(["", *self._log.read().strip().splitlines()[-LOG_TAIL_LINES:]])

    def end_input(self) -> None:
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.end_input()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()
        self._log.close()


def environment() -> dict[str, str]:
    """What runs where. Asks the driver and not torch, whose context would take GPU memory."""
    import torch

    found = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d")}
    found |= {"device": "CPU", "torch": torch.__version__}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        found["device"] = answer.stdout.strip().splitlines()[0]
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("megatron-core", "transformer-engine-torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# ---- in a worker ---------------------------------------------------------------------------------


def serve(prepare: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """A worker's life, which ends here. ``prepare`` imports and returns what answers requests."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print goes to the log from here on.
    status = 1
    try:
        answer = prepare()
        print(json.dumps({"status": "ready"}), file=answers)
        for request in _requests():
            print(json.dumps(answer(request)), file=answers)
        status = 0
    except Exception:
        traceback.print_exc()
    # Nothing is worth the wait for libraries that say goodbye to ranks which may be gone already.
    sys.stderr.flush()
    os._exit(status)


def _requests() -> Iterator[dict[str, Any]]:
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
