"""Which (query, key) pairs of the whole sequence attend, and how a rectangle of them is cut into
blocks.

Every mask is a band around the diagonal, optionally cut into packed documents: query position i
sees key position j when ``i - left <= j <= i + right`` and both lie in the same document. Positions
are global.
"""

from dataclasses import dataclass
from enum import StrEnum

from megatron_distflash.plan.spans import Span


class MaskKind(StrEnum):
    """What a kernel has to mask inside one block."""

    FULL = "full"  # nothing
    CAUSAL = "causal"  # keys after the query
    BAND = "band"  # keys outside the plan's band


@dataclass(frozen=True, slots=True)
class Mask:
    """A banded mask.

    Args:
        left: how many tokens before itself a query sees; None: all of them.
        right: how many tokens after itself a query sees; None: all, 0: causal.
        documents: ascending boundaries ``(0, …, sequence length)`` of packed documents; empty: one
            document.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and reach < 0:
                raise ValueError(f"the mask's {name} reach must be at least 0 tokens, not {reach}")
        ends = self.documents
        if ends and (ends[0] != 0 or any(a >= b for a, b in zip(ends, ends[1:], strict=False))):
            raise ValueError(f"document boundaries must ascend from 0, got {ends}")

    @classmethod
    def causal(cls) -> "Mask":
        return cls(right=0)

    @classmethod
    def full(cls) -> "Mask":
        return cls()

    @classmethod
    def sliding_window(cls, tokens: int) -> "Mask":
        """Causal; a query sees itself and the ``tokens - 1`` tokens before it."""
        if tokens < 1:
            raise ValueError(f"a sliding window needs at least 1 token, got {tokens}")
        return cls(left=tokens - 1, right=0)

    @classmethod
    def packed(cls, documents: tuple[int, ...], *, causal: bool = True) -> "Mask":
        """Documents with boundaries ``(0, …, sequence length)`` do not see each other."""
        return cls(right=0 if causal else None, documents=tuple(documents))

    def __str__(self) -> str:
        if self.left is not None:
            name = "sliding window" if self.right == 0 else f"band {self.left}|{self.right}"
        else:
            name = {None: "full", 0: "causal"}.get(self.right, f"band |{self.right}")
        return f"{name}, packed documents" if self.documents else name

    def simplified(self, num_tokens: int) -> "Mask":
        """The same pairs of a sequence, without bounds that it is too short to meet."""
        left, right = (
            None if reach is not None and reach >= max(1, num_tokens - 1) else reach
            for reach in (self.left, self.right)
        )
        documents = () if self.documents == (0, num_tokens) else self.documents
        return Mask(left, right, documents)

    def blocks(self, queries: Span, keys: Span) -> list[tuple[Span, Span, MaskKind]]:
        """Rectangles that hold every attending pair of ``queries × keys``, as tight as they can be.

        One per document; none where nothing attends. In each, every row and every column has a
        pair.
        """
        found = []
        for document in self._documents_over(queries):
            block = self._tight(queries.intersect(document), keys.intersect(document))
            if block is not None:
                found.append((*block, self._kind(*block)))
        return found

    def pairs(self, queries: Span, keys: Span) -> int:
        """How many pairs of ``queries × keys`` attend."""
        if not self.documents:
            return band_pairs(queries, keys, self.left, self.right)
        return sum(
            band_pairs(queries.intersect(document), keys.intersect(document), self.left, self.right)
            for document in self._documents_over(queries)
        )

    def _documents_over(self, queries: Span) -> list[Span]:
        if not self.documents:
            return [Span(min(0, queries.start), max(queries.stop, 1 << 62))]
        spans = zip(self.documents, self.documents[1:], strict=False)
        return [Span(a, b) for a, b in spans if a < queries.stop and queries.start < b]

    def _tight(self, queries: Span, keys: Span) -> tuple[Span, Span] | None:
        if not len(queries) or not len(keys):
            return None
        left, right = self.left, self.right
        first = queries.start if right is None else max(queries.start, keys.start - right)
        stop = queries.stop if left is None else min(queries.stop, keys.stop + left)
        rows = Span(first, stop)
        if not len(rows):
            return None
        first = keys.start if left is None else max(keys.start, rows.start - left)
        stop = keys.stop if right is None else min(keys.stop, rows.stop + right)
        columns = Span(first, stop)
        return (rows, columns) if len(columns) else None

    def _kind(self, queries: Span, keys: Span) -> MaskKind:
        cut_right = self.right is not None and keys.stop - 1 > queries.start + self.right
        cut_left = self.left is not None and keys.start < queries.stop - 1 - self.left
        if not cut_left and not cut_right:
            return MaskKind.FULL
        return MaskKind.CAUSAL if cut_right and not cut_left and self.right == 0 else MaskKind.BAND

    def band_of(self, kind: MaskKind) -> tuple[int | None, int | None]:
        """The (left, right) reach that a block of this kind applies."""
        return {
            MaskKind.FULL: (None, None),
            MaskKind.CAUSAL: (None, 0),
            MaskKind.BAND: (self.left, self.right),
        }[kind]


def band_pairs(queries: Span, keys: Span, left: int | None, right: int | None) -> int:
    """How many pairs of ``queries × keys`` have ``i - left <= j <= i + right``."""
    if not len(queries) or not len(keys):
        return 0
    upto = len(queries) * len(keys) if right is None else _pairs_upto(queries, keys, right)
    below = 0 if left is None else _pairs_upto(queries, keys, -left - 1)
    return max(0, upto - below)


def band_edge(queries: Span, keys: Span, right: int | None) -> int:
    """How many pairs lie on the band's right edge, ``j == i + right``."""
    if right is None or not len(queries) or not len(keys):
        return 0
    return _pairs_upto(queries, keys, right) - _pairs_upto(queries, keys, right - 1)


def _pairs_upto(queries: Span, keys: Span, reach: int) -> int:
    """Pairs with ``j - i <= reach``: ``clamp(i + reach - keys.start + 1, 0, len(keys))`` a row."""
    width = len(keys)

    def clamped_sum(last: int) -> int:  # sum of clamp(t, 0, width) over t <= last
        if last <= 0:
            return 0
        ramp = min(last, width)
        return ramp * (ramp + 1) // 2 + max(0, last - width) * width

    offset = reach - keys.start + 1
    return clamped_sum(queries.stop - 1 + offset) - clamped_sum(queries.start - 1 + offset)
