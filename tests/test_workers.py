"""The pool of worker processes: what fails in a worker fails the case, and nothing hangs."""

import contextlib
import os
import signal
import time

import pytest

from tests.workers import WorkerError, WorkerPool


def rank_of_world(rank: int, world: int) -> tuple[int, int]:
    return rank, world


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def fail_on(rank: int, world: int, culprit: int, error: BaseException) -> None:
    print(f"rank {rank} was here")
    if rank == culprit:
        raise error


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(60)


def make_function(rank: int, world: int):
    return lambda: None


@contextlib.contextmanager
def numbered(seat):
    yield (f"{seat.rank}/{seat.world} run {seat.run_idx}",)


def leave_a_note(seat) -> None:
    (seat.directory / f"note{seat.rank}").touch()


@contextlib.contextmanager
def notes(seat):
    yield (sorted(path.name for path in seat.directory.glob("note*")),)


def echo(text):
    return text


@pytest.fixture
def pool():
    pool = WorkerPool(3)
    yield pool
    pool.close()


def test_results_come_by_rank_from_the_same_processes(pool):
    assert pool.run(rank_of_world) == [(0, 3), (1, 3), (2, 3)]
    assert pool.run(rank_of_world, world=2) == [(0, 2), (1, 2)]
    first = pool.run(process_id)
    assert pool.run(process_id) == first and len(set(first)) == 3


@pytest.mark.parametrize("error", [RuntimeError("went wrong"), SystemExit("went wrong")])
def test_an_error_fails_the_case_with_traceback_and_log(pool, error):
    before = pool.run(process_id)
    with pytest.raises(WorkerError, match="(?s)rank 1: Traceback.*went wrong.*rank 1 was here"):
        pool.run(fail_on, 1, error)
    assert set(pool.run(process_id)).isdisjoint(before)


def test_processes_can_outlive_a_failure():
    pool = WorkerPool(2, keep_after_failure=True)
    before = pool.run(process_id)
    with pytest.raises(WorkerError, match="went wrong"):
        pool.run(fail_on, 0, ValueError("went wrong"))
    assert pool.run(process_id) == before
    with pytest.raises(WorkerError):
        pool.run(die_on, 0)
    assert set(pool.run(process_id)).isdisjoint(before)
    pool.close()


def test_a_dead_worker_fails_the_case(pool):
    with pytest.raises(WorkerError, match="rank 2: died with exit code -9"):
        pool.run(die_on, 2)
    assert pool.run(rank_of_world, world=1) == [(0, 1)]


def test_a_hung_worker_fails_the_case_and_says_where(pool):
    pool.run(rank_of_world)
    with pytest.raises(WorkerError, match="(?s)rank 0: no answer.*in sleep_on"):
        pool.run(sleep_on, 0, timeout_s=0.5)


def test_what_cannot_be_pickled_fails_the_case(pool):
    with pytest.raises(WorkerError, match="(?i)pickle"):
        pool.run(make_function)


def test_a_template_that_cannot_import_fails_the_case():
    pool = WorkerPool(1, modules=["no_such_module"])
    with pytest.raises(WorkerError, match="(?s)did not start.*no_such_module"):
        pool.run(rank_of_world)
    pool.close()


def test_around_gives_the_first_arguments():
    pool = WorkerPool(2, around=numbered)
    assert pool.run(echo) == ["0/2 run 0", "1/2 run 0"]
    assert pool.run(echo, world=1) == ["0/1 run 1"]
    pool.close()


def test_every_worker_prepares_also_if_the_first_case_is_small():
    pool = WorkerPool(2, prepare=leave_a_note, around=notes)
    assert "note0" in pool.run(echo, world=1)[0]
    assert pool.run(echo)[1] == ["note0", "note1"] == pool.run(echo)[0]
    pool.close()


def test_world_must_fit(pool):
    with pytest.raises(ValueError, match="from 1 to 3, not 4"):
        pool.run(rank_of_world, world=4)
