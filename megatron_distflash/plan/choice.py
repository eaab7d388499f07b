"""Which schedule suits a mask, a model and a network: the one whose plans take least time on the
simple machine of ``timing``.

``balanced`` sends queries as well as keys and values, in few and large steps; ``zigzag`` sends keys
and values only, which is less where few KV heads serve many query heads; ``ring`` sends still
fewer of those, but ranks idle. On a fast link nothing of that shows and ``balanced`` is taken; on a
slow one what is sent decides.
"""

from functools import lru_cache

from megatron_distflash.plan.masks import Mask
from megatron_distflash.plan.plan import PlanError
from megatron_distflash.plan.schedules import build, build_backward
from megatron_distflash.plan.timing import simulate

CONTIGUOUS = ("balanced", "ring")
ANY_LAYOUT = ("balanced", "zigzag", "ring")

BACKWARD_WORK = 2.5  # Products of the backward for each of the forward: five for two.
_NOISE = 1.01  # Plans that are this close are equally fast: the earlier candidate is taken.


@lru_cache(maxsize=64)
def choose_schedule(
    lengths: tuple[int, ...],
    *,
    num_heads: int,
    num_kv_heads: int,
    mask: Mask,
    chunk_time: float = 0.0,
    among: tuple[str, ...] = CONTIGUOUS,
) -> str:
    """The name of the fastest schedule for a forward and a backward.

    Args:
        lengths, num_heads, num_kv_heads, mask: as in ``build``.
        chunk_time: how long a chunk of n tokens of all query heads takes to move, in units of a
            forward block of n × n; see ``chunk_time_of``.
        among: the candidates; of equally fast ones the first.

    Raises:
        PlanError: none of the candidates can balance the mask; says why for the last.
    """
    best, best_time, refusal = None, 0.0, PlanError("there is no schedule to choose from")
    for schedule in among:
        options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "mask": mask}
        try:
            forward = build(schedule, lengths, **options)
        except PlanError as error:
            refusal = error
            continue
        backward = build_backward(schedule, lengths, **options)
        time = simulate(forward, chunk_time).total
        time += BACKWARD_WORK * simulate(backward, chunk_time / BACKWARD_WORK).total
        if best is None or time * _NOISE < best_time:
            best, best_time = schedule, time
    if best is None:
        raise refusal
    return best


def chunk_time_of(num_tokens: int, *, link_bytes_s: float, flops: float) -> float:
    """How long n tokens take to move while a block of n × n is computed in one unit of time.

    With queries W wide, n · W numbers of 16 bits travel for 4 · n² · W operations.

    Args:
        num_tokens: n, of a rank.
        link_bytes_s: what a rank sends per second, in bytes.
        flops: what it computes per second, in attention.
    """
    return flops / (2 * num_tokens * link_bytes_s)


__all__ = ["ANY_LAYOUT", "CONTIGUOUS", "choose_schedule", "chunk_time_of"]
