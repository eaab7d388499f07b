"""Fixtures of the tests that run Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mcore.harness import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """CPU ranks that live as long as the session; they start when a test first uses them."""
    pool = RankPool()
    yield pool
    pool.close()
