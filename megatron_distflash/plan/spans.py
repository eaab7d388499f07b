"""Half-open integer ranges: of tokens in the whole sequence, or of KV heads."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers ``start <= i < stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start if self.stop > self.start else 0

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def contains(self, other: "Span") -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def intersect(self, other: "Span") -> "Span":
        return Span(max(self.start, other.start), min(self.stop, other.stop))

    def halves(self) -> tuple["Span", "Span"]:
        """Cut in the middle; the second half is the longer one when the length is odd."""
        middle = self.start + len(self) // 2
        return Span(self.start, middle), Span(middle, self.stop)


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint spans that cover the same integers; touching spans are joined."""
    joined: list[Span] = []
    for span in sorted(span for span in spans if len(span)):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = Span(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined
