"""The order of a schedule's work: what is computed while the first inputs and the last results are
on their way.

A plain order begins with all of a rank's local work, more than the first arrivals need, and ends
with results in flight that nothing is left to hide. ``hide_ends`` cuts two things in two:

- the local block: the triangles on the diagonal run first, the square below them last;
- where helpers return results, the blocks of the farthest distance, by heads: one half runs right
  after the triangles, the other right before the square, so that what arrives first and what leaves
  last is small.

For P ranks, in blocks of n × n (``cost``), with the distances between from far to near:

    1/4 triangles, 1/4 far (1/2 at odd P), 1 …, 1, 1/4 far (1/2), 1/4 square

Every rank's parts cost the same, so that no rank idles. Pieces are no smaller than that because
kernels are slower on small blocks; cut by heads rather than by rows, nothing travels twice.
"""

from megatron_distflash.plan.lower import Block, Work
from megatron_distflash.plan.masks import Mask, MaskKind


def hide_ends(work: Work, mask: Mask, *, is_helped: bool) -> Work:
    """``work`` reordered. Its first step is local; if it is helped, its second is the farthest."""
    if len(work) < 2 or mask not in (Mask.causal(), Mask.full()):
        return work
    first, last = _halves_of_step(work[0], _cut_local)
    remote = _far_apart(work[1:]) if is_helped else work[1:]
    return [step for step in [first, *remote, last] if any(step)]


def _far_apart(remote: Work) -> Work:
    """The farthest distance half first and half last."""
    num_heads = {len(block.heads) for blocks in remote[0] for block in blocks}
    if len(num_heads) > 1 or num_heads == {1}:  # halves would differ from rank to rank
        return remote
    first, last = _halves_of_step(remote[0], _cut_heads)
    return [first, *remote[1:], last]


def _halves_of_step(step, cut) -> tuple[list[list[Block]], list[list[Block]]]:
    halves = [cut(blocks) for blocks in step]
    return [first for first, _ in halves], [last for _, last in halves]


def _cut_local(blocks: list[Block]) -> tuple[list[Block], list[Block]]:
    """(first, last) of one rank's local blocks."""
    whole = [block for block in blocks if block.kind is MaskKind.FULL]
    if whole and len(whole) < len(blocks):  # two chunks: between them lies a square already
        return [block for block in blocks if block not in whole], whole
    first, last = [], []
    for block in blocks:
        now, later = _cut_rows(block) if block.kind is MaskKind.FULL else _cut_diagonal(block)
        first += now
        last += later
    return first, last


def _cut_diagonal(block: Block) -> tuple[list[Block], list[Block]]:
    """Triangles, square. A diagonal block has the same queries and keys."""
    if block.queries != block.keys or len(block.queries) < 2:
        return [block], []
    before, after = block.queries.halves()
    triangles = [
        Block(tokens, tokens, block.heads, MaskKind.CAUSAL if len(tokens) > 1 else MaskKind.FULL)
        for tokens in (before, after)
    ]
    return triangles, [Block(after, before, block.heads, MaskKind.FULL)]


def _cut_rows(block: Block) -> tuple[list[Block], list[Block]]:
    if len(block.queries) < 2:
        return [block], []
    first, last = (
        Block(rows, block.keys, block.heads, block.kind) for rows in block.queries.halves()
    )
    return [first], [last]


def _cut_heads(blocks: list[Block]) -> tuple[list[Block], list[Block]]:
    halves = [
        [Block(block.queries, block.keys, heads, block.kind) for heads in block.heads.halves()]
        for block in blocks
    ]
    return [first for first, _ in halves], [last for _, last in halves]


__all__ = ["hide_ends"]
