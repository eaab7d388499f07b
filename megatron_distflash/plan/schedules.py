"""Schedule builders: which rank computes which block in which step.

balanced
    Contiguous chunks. Ranks that run out of causal work help the others (DISTFLASHATTN, arXiv
    2310.03294, section 3.2). The pairs at distance P/2 of an even P, which leave half of the ranks
    idle in the paper, are shared by their two ends by heads (by query rows where KV heads cannot be
    halved). The distances run from far to near, so that few results travel home last, and the ends
    are cut (``order``) to hide the first arrivals and the last returns.
paper
    Contiguous chunks. The paper's Algorithm 2: helpers, and an idle half of the ranks at distance
    P/2.
ring
    Contiguous chunks, no helpers: every rank computes what its own queries need.
zigzag
    2P chunks, rank r holds the chunks r and 2P - 1 - r, no helpers: what Megatron with Transformer
    Engine does, except that keys which a rank cannot use are not sent to it.
"""

from collections.abc import Callable
from functools import lru_cache

from megatron_distflash.plan.backward import backward
from megatron_distflash.plan.lower import PREFETCH, Block, Work, lower
from megatron_distflash.plan.masks import Mask, MaskKind
from megatron_distflash.plan.order import hide_ends
from megatron_distflash.plan.plan import Direction, Layout, Plan, PlanError, contiguous, zigzag
from megatron_distflash.plan.spans import Span
from megatron_distflash.plan.validate import validate


@lru_cache(maxsize=256)
def build(
    schedule: str,
    lengths: tuple[int, ...],
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask,
    prefetch: int = PREFETCH,
    cut: bool = True,
) -> Plan:
    """A validated forward plan, cached.

    Args:
        schedule: a name from ``SCHEDULES``.
        lengths: how many tokens each rank holds; zero is allowed.
        num_heads, num_kv_heads: query heads, and the KV heads they share evenly.
        mask: which pairs attend; packed documents must end where the sequence ends.
        prefetch: how many steps transfers may take: inputs are sent that many before their use,
            results added to their owner's state that many after they were sent.
        cut: hide the first arrivals and the last returns of ``balanced`` and ``zigzag``
            (``order``); the other schedules are as published.

    Raises:
        PlanError: an unknown schedule, heads that do not divide, or a mask this schedule cannot
            balance.
    """
    builder = SCHEDULES.get(schedule)
    if builder is None:
        raise PlanError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if not lengths or sum(lengths) == 0:
        raise PlanError("a plan needs at least one rank and one token")
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise PlanError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if mask.documents and mask.documents[-1] != sum(lengths):
        end = mask.documents[-1]
        raise PlanError(f"the last document ends at token {end}, the sequence at {sum(lengths)}")
    mask = mask.simplified(sum(lengths))
    layout = zigzag(lengths) if schedule == "zigzag" else contiguous(lengths)
    work = builder(layout, Span(0, num_kv_heads), mask)
    if cut and schedule in ("balanced", "zigzag"):
        work = hide_ends(work, mask, is_helped=schedule == "balanced" and mask == Mask.causal())
    plan = lower(
        work,
        schedule=schedule,
        direction=Direction.FORWARD,
        layout=layout,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mask=mask,
        prefetch=prefetch,
    )
    validate(plan)
    return plan


@lru_cache(maxsize=256)
def build_backward(schedule: str, lengths: tuple[int, ...], **options) -> Plan:
    """The validated backward plan of ``build`` with the same arguments, cached."""
    plan = backward(build(schedule, lengths, **options), options.get("prefetch", PREFETCH))
    validate(plan)
    return plan


def _balanced(layout: Layout, heads: Span, mask: Mask) -> Work:
    return _helped(layout, heads, mask, _share_pair, "balanced")


def _paper(layout: Layout, heads: Span, mask: Mask) -> Work:
    return _helped(layout, heads, mask, _leave_pair_to_owner, "paper")


def _ring(layout: Layout, heads: Span, mask: Mask) -> Work:
    """Step t: every rank attends to what the rank t before it holds, around the ring."""
    num_ranks = layout.num_ranks
    return _without_empty_steps(
        [
            [
                _pair_blocks(layout, heads, mask, rank, (rank - t) % num_ranks)
                for rank in range(num_ranks)
            ]
            for t in range(num_ranks)
        ]
    )


def _helped(layout: Layout, heads: Span, mask: Mask, split_pair: Callable, name: str) -> Work:
    """Distance t: rank r >= t computes its own (r, r - t), rank r < t helps rank r + P - t."""
    if mask == Mask.full() or layout.num_ranks == 1:
        return _ring(layout, heads, mask)  # every rank has the same work: nothing to help with
    if mask != Mask.causal():
        raise PlanError(
            f"schedule {name!r} cannot balance a mask of kind '{mask}' yet; use 'ring' or 'zigzag'"
        )
    num_ranks = layout.num_ranks
    steps = [[_pair_blocks(layout, heads, mask, rank, rank) for rank in range(num_ranks)]]
    distances = list(range(1, (num_ranks - 1) // 2 + 1))
    if num_ranks % 2 == 0:
        steps.append(_middle_step(layout, heads, mask, split_pair))
    for t in reversed(distances):
        steps.append(
            [
                _pair_blocks(
                    layout,
                    heads,
                    mask,
                    *((rank, rank - t) if rank >= t else (rank + num_ranks - t, rank)),
                )
                for rank in range(num_ranks)
            ]
        )
    return _without_empty_steps(steps)


def _middle_step(
    layout: Layout, heads: Span, mask: Mask, split_pair: Callable
) -> list[list[Block]]:
    """The pairs at distance P/2 of an even P: owner r + P/2, KV of rank r."""
    half = layout.num_ranks // 2
    step: list[list[Block]] = [[] for _ in range(layout.num_ranks)]
    for rank in range(half):
        for block in _pair_blocks(layout, heads, mask, rank + half, rank):
            step[rank], step[rank + half] = split_pair(block)
    return step


def _share_pair(block: Block) -> tuple[list[Block], list[Block]]:
    """(helper's, owner's) half; by heads half of q moves one way and half of KV the other."""
    if len(block.heads) % 2 == 0:
        first, second = block.heads.halves()
        return [_with_heads(block, second)], [_with_heads(block, first)]
    first, second = block.queries.halves()
    helped = [Block(first, block.keys, block.heads, block.kind)] if len(first) else []
    return helped, [Block(second, block.keys, block.heads, block.kind)]


def _leave_pair_to_owner(block: Block) -> tuple[list[Block], list[Block]]:
    return [], [block]


def _with_heads(block: Block, heads: Span) -> Block:
    return Block(block.queries, block.keys, heads, block.kind)


def _pair_blocks(layout: Layout, heads: Span, mask: Mask, owner: int, source: int) -> list[Block]:
    """The blocks of all attending pairs between one rank's queries and another's keys."""
    blocks = []
    for queries in layout.chunks_of(owner):
        for keys in layout.chunks_of(source):
            for rows, columns, kind in mask.blocks(queries.tokens, keys.tokens):
                blocks.append(Block(rows, columns, heads, MaskKind(kind)))
    return blocks


def _without_empty_steps(steps: Work) -> Work:
    return [step for step in steps if any(step)] or steps[:1]


SCHEDULES: dict[str, Callable[[Layout, Span, Mask], Work]] = {
    "balanced": _balanced,
    "paper": _paper,
    "ring": _ring,
    "zigzag": _ring,
}
