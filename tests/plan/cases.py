"""Shapes, heads and masks for the plan's property tests, and what a mask means, pair by pair."""

import numpy as np
from hypothesis import strategies as st

from megatron_distflash.plan import SCHEDULES, Mask

# (query heads, KV heads): one head, MHA even and odd, GQA even and odd, MQA
HEADS = [(1, 1), (4, 4), (5, 5), (8, 2), (6, 3), (8, 1)]

schedules = st.sampled_from(sorted(SCHEDULES))
heads = st.sampled_from(HEADS)


def lengths(max_ranks: int, max_tokens: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Tokens per rank: all equal, or ragged with zeros and ones among them."""
    ranks = st.integers(1, max_ranks)
    even = st.builds(lambda num_ranks, n: (n,) * num_ranks, ranks, st.integers(1, max_tokens))
    ragged = ranks.flatmap(
        lambda num_ranks: st.lists(
            st.one_of(st.sampled_from([0, 1]), st.integers(0, max_tokens)),
            min_size=num_ranks,
            max_size=num_ranks,
        )
    )
    return st.one_of(even, ragged.map(tuple)).filter(sum)


@st.composite
def documents(draw, num_tokens: int) -> tuple[int, ...]:
    """Document boundaries of a sequence of ``num_tokens``."""
    cuts = draw(st.sets(st.integers(1, num_tokens - 1), max_size=6)) if num_tokens > 1 else set()
    return (0, *sorted(cuts), num_tokens)


def masks(num_tokens: int) -> st.SearchStrategy[Mask]:
    """Every kind of mask, and bands that look ahead or are packed, which nobody asks for yet."""
    reach = st.one_of(st.none(), st.integers(0, num_tokens + 1))
    packed = documents(num_tokens)
    return st.one_of(
        st.just(Mask.causal()),
        st.just(Mask.full()),
        st.integers(1, num_tokens + 1).map(Mask.sliding_window),
        st.builds(lambda ends, causal: Mask.packed(ends, causal=causal), packed, st.booleans()),
        st.builds(Mask, reach, reach, st.one_of(st.just(()), packed)),
    )


def attends(mask: Mask, num_tokens: int) -> np.ndarray:
    """[query, key] bool: the mask's definition, pair by pair."""
    query, key = np.mgrid[0:num_tokens, 0:num_tokens]
    seen = within_band(query, key, mask.left, mask.right)
    if mask.documents:
        document = np.searchsorted(mask.documents, np.arange(num_tokens), side="right")
        seen &= document[:, None] == document[None, :]
    return seen


def within_band(query, key, left: int | None, right: int | None) -> np.ndarray:
    """Bool: where ``query - left <= key <= query + right``; None is unbounded."""
    seen = np.ones(np.broadcast(query, key).shape, dtype=bool)
    if left is not None:
        seen &= key >= query - left
    if right is not None:
        seen &= key <= query + right
    return seen
