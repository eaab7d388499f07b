"""Eight ranks over gloo for all tests of the runtime."""

import secrets
from collections.abc import Iterator

import pytest
import torch

from tests.runtime.ranks import around, connect
from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """``ranks.run(function, *args, world=P)`` calls function(rank, group, *args) on P ranks."""
    pool = WorkerPool(8, modules=["torch", "torch._dynamo"], prepare=connect, around=around)
    yield pool
    pool.close()


@pytest.fixture
def seed() -> int:
    """Fresh in every run; the messages of ``check`` name it."""
    return secrets.randbits(32)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The ranks use one thread each; more of them here would only be in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
