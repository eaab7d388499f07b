"""The backward plan, derived from the forward plan.

Every rank computes the same blocks in the same steps. A block computed by its owner moves KV in and
sends dKV home to KV's owner; a block computed by a helper moves (q, dO, LSE, delta) in and sends dQ
home.
"""

from megatron_distflash.plan.lower import PREFETCH, blocks_of, lower
from megatron_distflash.plan.plan import Direction, Plan, PlanError


def backward(plan: Plan, prefetch: int = PREFETCH) -> Plan:
    """The backward plan of a forward plan; ``prefetch`` as in ``lower``."""
    if plan.direction is not Direction.FORWARD:
        raise PlanError("a backward plan is derived from a forward plan, not from a backward one")
    work = [step for step in blocks_of(plan) if any(step)]
    return lower(
        work or [[[] for _ in range(plan.num_ranks)]],
        schedule=plan.schedule,
        direction=Direction.BACKWARD,
        layout=plan.layout,
        num_heads=plan.num_heads,
        num_kv_heads=plan.num_kv_heads,
        mask=plan.mask,
        prefetch=prefetch,
    )
