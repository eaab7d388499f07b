"""Run many test cases inside one set of worker processes.

Importing torch takes seconds and Megatron more, so a pool imports once, in a template process that
then forks every worker, and the workers live from case to case:

    def sum_of_ranks(rank: int, world: int, scale: float) -> float:   # module-level: it is pickled
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    def test_sum(pool):
        assert pool.run(sum_of_ranks, 2.0, world=3) == [6.0, 6.0, 6.0]

A worker that raises, dies or never answers fails its case with the worker's traceback and the end
of its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

LOG_TAIL_CHARS = 3000
GRACE_S = 10.0  # After one worker failed, the others have that long to notice.
START_S = 300.0  # Forking waits for the template's imports; a busy machine takes its time.

# Also on a machine with GPUs the workers are CPU ranks; libraries start no threads of their own.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


class WorkerError(AssertionError):
    """A case failed on some worker; the message holds each failing one's traceback and log tail."""


class Seat(NamedTuple):
    """A worker's place in one case."""

    rank: int
    world: int
    run_idx: int  # How many cases these processes had before.
    directory: Path  # Shared by the workers; empty when they start.
    timeout_s: float


class WorkerPool:
    """Persistent worker processes, started when the first case needs them.

    Args:
        num_workers: the most that a case may use.
        modules: what the template imports before it forks; none of them may start a thread.
        prepare: called once in every new worker, with the seat it would have if a case used all.
        around: makes the context of every case; what it yields are the case's first arguments.
            Default: (rank, world).
        keep_after_failure: whether the processes live on when a case failed but every worker
            answered. Only if ``around`` leaves nothing behind.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        modules: Sequence[str] = (),
        prepare: Callable[[Seat], None] | None = None,
        around: Callable[[Seat], contextlib.AbstractContextManager[tuple]] | None = None,
        keep_after_failure: bool = False,
    ) -> None:
        self.num_workers = num_workers
        self._setup = _Setup(tuple(modules), prepare, around or _rank_and_world)
        self._keep_after_failure = keep_after_failure
        self._workers: _Workers | None = None
        self._num_runs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout_s: float = 240.0,
    ) -> list[Any]:
        """Run ``function`` on ``world`` workers (default: all); returns the results by rank.

        Args:
            function: a module-level function; it, ``args`` and the results are pickled.
            timeout_s: when it is over, the workers are killed; the next case starts fresh ones.

        Raises:
            WorkerError: a worker raised, died, or did not answer in time.
        """
        world = self.num_workers if world is None else world
        if not 1 <= world <= self.num_workers:
            raise ValueError(f"world must be from 1 to {self.num_workers}, not {world}")
        if self._workers is None:
            self._workers, self._num_runs = _Workers(self.num_workers, self._setup), 0
        for rank in range(world):
            seat = Seat(rank, world, self._num_runs, self._workers.directory, timeout_s)
            self._workers.send(rank, (seat, function, args))
        self._num_runs += 1
        results, failures, usable = self._workers.collect(world, timeout_s)
        if failures and not (usable and self._keep_after_failure):
            self.close()
        if failures:
            raise WorkerError("\n".join(failures))
        return results

    def close(self) -> None:
        """End the processes and delete their logs; a later case starts new ones."""
        if self._workers is not None:
            self._workers.kill()
            self._workers = None


class _Setup(NamedTuple):
    modules: tuple[str, ...]
    prepare: Callable[[Seat], None] | None
    around: Callable[[Seat], contextlib.AbstractContextManager[tuple]]


@contextlib.contextmanager
def _rank_and_world(seat: Seat):
    yield seat.rank, seat.world


# ---- in the test's process ----------------------------------------------------------------------


class _Workers:
    """One generation of worker processes, seen from the test's process."""

    def __init__(self, num_workers: int, setup: _Setup) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="workers-"))
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_workers)]
        self._connections = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        self._template = context.Process(
            target=_template_main, args=(theirs, self.directory, setup), daemon=True
        )
        with _environment():
            self._template.start()
        for end in theirs:
            end.close()
        self._is_started = False

    def send(self, rank: int, case: tuple) -> None:
        with contextlib.suppress(BrokenPipeError):  # A dead worker; ``collect`` tells how it died.
            self._connections[rank].send(case)

    def collect(self, world: int, timeout_s: float) -> tuple[list[Any], list[str], bool]:
        """(results by rank, failures, whether every worker answered and lives)."""
        start_s = 0.0 if self._is_started else START_S
        deadline = time.monotonic() + start_s + timeout_s + 2.0  # Hung workers say where first.
        results: list[Any] = [None] * world
        failures: list[str] = []
        usable = True
        pending = {self._connections[rank]: rank for rank in range(world)}
        while pending:
            left_s = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(pending), timeout=left_s)
            if not ready:
                failures += [f"rank {r}: no answer{self._log_tail(r)}" for r in pending.values()]
                return results, failures, False
            for connection in ready:
                rank = pending.pop(connection)
                state, value = self._receive(connection)
                if state == "ok":
                    results[rank] = value
                    continue
                failures.append(f"rank {rank}: {value}{self._log_tail(rank)}")
                usable &= state == "raised"
                # The others may wait for this worker in a collective.
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._is_started = True
        return results, failures, usable

    def kill(self) -> None:
        self._template.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._template.pid, signal.SIGKILL)  # Its group are all workers.
        self._template.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return "died", f"the workers did not start{self._tail('template.log')}"

    def _log_tail(self, rank: int) -> str:
        return self._tail(_log_name(rank))

    def _tail(self, name: str) -> str:
        path = self.directory / name
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        return f"\n--- end of its log ---\n{text[-LOG_TAIL_CHARS:]}\n" if text else ""


@contextlib.contextmanager
def _environment():
    """What a process started meanwhile inherits; it may import torch before it runs our code."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ |= _ENVIRONMENT
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- in the template and the workers ------------------------------------------------------------


def _log_name(rank: int) -> str:
    return f"rank{rank}.log"


def _template_main(connections: list[Connection], directory: Path, setup: _Setup) -> None:
    """Life of the template: import, fork the workers, and tell when one of them dies."""
    os.setsid()
    _redirect_output(directory / "template.log")
    for module in setup.modules:
        importlib.import_module(module)
    _assert_one_thread(setup.modules)
    ranks = {}
    for rank in range(len(connections)):
        pid = os.fork()
        if pid == 0:
            _worker_main(rank, connections, directory, setup)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # The test's process is gone itself.
            exit_code = os.waitstatus_to_exitcode(status)
            connections[rank].send(("died", f"died with exit code {exit_code}"))
        connections[rank].close()


def _worker_main(rank: int, connections: list[Connection], directory: Path, setup: _Setup) -> None:
    """Life of a worker: one case after the other until the test's end of the pipe closes.

    Never returns: a fork must not run on in the template's code.
    """
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    log = directory / _log_name(rank)
    _redirect_output(log)
    faulthandler.enable()
    try:
        if setup.prepare is not None:
            setup.prepare(Seat(rank, len(connections), 0, directory, START_S))
        while True:
            _serve(connections[rank], setup, log)
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _serve(connection: Connection, setup: _Setup, log: Path) -> None:
    """Run the next case and answer ("ok", result) or ("raised", traceback)."""
    message = connection.recv_bytes()
    os.truncate(log, 0)
    try:
        seat, function, args = pickle.loads(message)
        faulthandler.dump_traceback_later(seat.timeout_s)
        with setup.around(seat) as place:
            result = function(*place, *args)
        answer = ForkingPickler.dumps(("ok", result))
    except BaseException:  # A SystemExit is a failure of the case, too.
        answer = ForkingPickler.dumps(("raised", traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(answer)


def _assert_one_thread(modules: tuple[str, ...]) -> None:
    """A fork copies only the thread that forks, and every lock that others hold."""
    if sys.platform != "linux":
        return
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"cannot fork: threads {threads} after importing {modules}"


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
