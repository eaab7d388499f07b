"""When things happen: the step that each transfer is needed in, and a plan's time on a simple
machine.

The machine computes a block of n × n in one unit of time and moves one chunk (``cost``) in
``chunk_time`` units over a rank's link, in both directions at once. Transfers run beside compute,
at no cost to it. A rank posts them step by step; those of a step that the same later step needs
form a group, which starts when all its ends have posted it and are done with the group before, and
ends for all of them together.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from megatron_distflash.plan.cost import step_work, volume
from megatron_distflash.plan.plan import Payload, Plan, Step, Transfer


@dataclass(frozen=True, slots=True)
class PlanTime:
    """In blocks of n × n.

    Attributes:
        total: from the start to the end of the slowest rank.
        compute: the slowest rank's own work.
    """

    total: float
    compute: float

    @property
    def exposed(self) -> float:
        """The share of the time in which the plan is slower than its work."""
        return 1 - self.compute / self.total


@lru_cache(maxsize=64)
def needs(plan: Plan) -> dict[tuple[int, Transfer], int]:
    """[step it is posted in, transfer]: the first step in which its target reads it."""
    needed = {}
    for steps in plan.steps:
        next_read: dict[tuple[Payload, int], int] = {}
        for step_idx in reversed(range(len(steps))):
            for transfer in steps[step_idx].receives:
                place = transfer.payload, transfer.target_slot
                needed[step_idx, transfer] = next_read[place]
            next_read.update(dict.fromkeys(_reads(steps[step_idx]), step_idx))
    return needed


def _reads(step: Step) -> set[tuple[Payload, int]]:
    """The received slots that a step merges or computes from."""
    found = {(merge.payload, merge.slot) for merge in step.merges}
    for task in step.tasks:
        outputs = [output.payload for output in task.outputs]
        query = Payload.QUERY if Payload.PARTIAL in outputs else Payload.QUERY_GRAD
        found.add((query, task.query_slot))
        found.add((Payload.KEY_VALUE, task.key_value_slot))
    return {(payload, slot) for payload, slot in found if slot is not None}


def simulate(plan: Plan, chunk_time: float) -> PlanTime:
    """The plan's time where a chunk takes ``chunk_time`` blocks' time to move."""
    ranks, needed = range(plan.num_ranks), needs(plan)
    groups = defaultdict(list)
    for (posted, transfer), step_idx in needed.items():
        groups[posted, step_idx].append(transfer)
    clock, link = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
    arrivals: dict[tuple[int, int], float] = defaultdict(float)  # [rank, step that needs it]
    for step_idx in range(plan.num_steps):
        for rank in ranks:
            clock[rank] = max(clock[rank], arrivals[rank, step_idx])
        for need in sorted(need for posted, need in groups if posted == step_idx):
            _move(plan, groups[step_idx, need], need, chunk_time, clock, link, arrivals)
        for rank in ranks:
            clock[rank] += float(step_work(plan, rank, step_idx))
    compute = max(sum(float(step_work(plan, r, s)) for s in range(plan.num_steps)) for r in ranks)
    return PlanTime(max(clock), compute)


def _move(plan, transfers, need, chunk_time, clock, link, arrivals) -> None:
    """One group on all ranks. Ranks that share a transfer, also through others, move together."""
    for members in _connected(transfers):
        ends = {rank for transfer in members for rank in (transfer.source, transfer.target)}
        load = max(
            sum(float(volume(plan, t)) for t in members if getattr(t, side) == rank)
            for rank in ends
            for side in ("source", "target")
        )
        end = max(max(clock[rank], link[rank]) for rank in ends) + load * chunk_time
        for rank in ends:
            link[rank] = end
        for transfer in members:
            arrivals[transfer.target, need] = max(arrivals[transfer.target, need], end)


def _connected(transfers: list[Transfer]) -> list[list[Transfer]]:
    groups: list[tuple[set[int], list[Transfer]]] = []
    for transfer in transfers:
        ends, members = {transfer.source, transfer.target}, [transfer]
        apart = []
        for other_ends, others in groups:
            if ends & other_ends:
                ends, members = ends | other_ends, others + members
            else:
                apart.append((other_ends, others))
        groups = [*apart, (ends, members)]
    return [members for _, members in groups]


__all__ = ["PlanTime", "needs", "simulate"]
