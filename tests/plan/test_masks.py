"""Masks against their definition, pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_distflash.plan import Mask, MaskKind
from megatron_distflash.plan.masks import band_edge, band_pairs
from megatron_distflash.plan.spans import Span, union
from tests.plan.cases import attends, masks, within_band

NUM_TOKENS = 24

spans = st.tuples(st.integers(0, NUM_TOKENS), st.integers(0, NUM_TOKENS)).map(
    lambda ends: Span(min(ends), max(ends))
)
reaches = st.one_of(st.none(), st.integers(-NUM_TOKENS, NUM_TOKENS))


def _rectangle(seen: np.ndarray, queries: Span, keys: Span) -> np.ndarray:
    return seen[queries.start : queries.stop, keys.start : keys.stop]


@given(masks(NUM_TOKENS), spans, spans)
def test_pairs_counts_what_attends(mask, queries, keys):
    assert mask.pairs(queries, keys) == _rectangle(attends(mask, NUM_TOKENS), queries, keys).sum()


@given(masks(NUM_TOKENS), spans, spans)
def test_blocks_hold_every_pair_once_and_no_other(mask, queries, keys):
    seen = attends(mask, NUM_TOKENS)
    computed = np.zeros((NUM_TOKENS, NUM_TOKENS), dtype=int)
    for rows, columns, kind in mask.blocks(queries, keys):
        assert queries.contains(rows) and keys.contains(columns)
        row, column = np.ogrid[rows.start : rows.stop, columns.start : columns.stop]
        _rectangle(computed, rows, columns)[...] += within_band(row, column, *mask.band_of(kind))
    wanted = np.zeros_like(computed)
    _rectangle(wanted, queries, keys)[...] = _rectangle(seen, queries, keys)
    np.testing.assert_array_equal(computed, wanted)


@given(masks(NUM_TOKENS), spans, spans)
def test_blocks_are_tight_and_mask_no_more_than_they_must(mask, queries, keys):
    seen = attends(mask, NUM_TOKENS)
    for rows, columns, kind in mask.blocks(queries, keys):
        block = _rectangle(seen, rows, columns)
        assert block.any(axis=0).all() and block.any(axis=1).all()
        assert (kind is MaskKind.FULL) == block.all()


@given(spans, spans, reaches, reaches)
def test_band_pairs(queries, keys, left, right):
    query, key = np.ogrid[queries.start : queries.stop, keys.start : keys.stop]
    assert band_pairs(queries, keys, left, right) == within_band(query, key, left, right).sum()


@given(spans, spans, st.one_of(st.none(), st.integers(0, NUM_TOKENS)))
def test_band_edge(queries, keys, right):
    query, key = np.ogrid[queries.start : queries.stop, keys.start : keys.stop]
    on_edge = 0 if right is None else int((key == query + right).sum())
    assert band_edge(queries, keys, right) == on_edge


@given(st.lists(spans))
def test_union_covers_the_same_integers_with_gaps_between(pieces):
    joined = union(pieces)
    covered = [i for span in joined for i in range(span.start, span.stop)]
    assert covered == sorted({i for span in pieces for i in range(span.start, span.stop)})
    assert all(a.stop < b.start for a, b in zip(joined, joined[1:], strict=False))


def test_names():
    assert str(Mask.causal()) == "causal"
    assert str(Mask.full()) == "full"
    assert str(Mask.sliding_window(5)) == "sliding window"
    assert str(Mask.packed((0, 3, 9))) == "causal, packed documents"
    assert str(Mask(left=2, right=3)) == "band 2|3"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(left=-1), "left reach must be at least 0 tokens, not -1"),
        (lambda: Mask(right=-2), "right reach must be at least 0 tokens, not -2"),
        (lambda: Mask.sliding_window(0), "at least 1 token, got 0"),
        (lambda: Mask.packed((1, 5)), "must ascend from 0"),
        (lambda: Mask.packed((0, 5, 5)), "must ascend from 0"),
    ],
)
def test_masks_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
