"""What a plan costs: steps, idle time, bytes on the wire, buffers.

Units: work in blocks of n × n pairs with all heads, n = sequence length / ranks, so that the causal
diagonal of a rank costs 1/2; volume in chunks of n tokens × all query heads (LSE and delta, one
number per row and head, are not counted). ``bytes_per_chunk`` turns volume into bytes.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from fractions import Fraction

from megatron_distflash.plan.backward import backward
from megatron_distflash.plan.masks import band_edge, band_pairs
from megatron_distflash.plan.plan import Payload, Plan, Task, Transfer


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Figures of a forward plan and of the backward plan derived from it.

    Attributes:
        steps: steps in which some rank computes.
        tail_steps: steps after the last computed one, which only bring results home.
        critical_path: sum over the steps of the slowest rank's work, in blocks.
        idle_fraction: share of the ranks' time in the critical path in which they compute nothing.
        volume_forward_mean, volume_forward_max, volume_backward_mean, volume_backward_max: chunks
            sent per rank.
        messages_forward_max: transfers sent by the busiest rank.
        live_buffers_forward, live_buffers_backward: slots of the rank that has most, in chunks.
    """

    steps: int
    tail_steps: int
    critical_path: float
    idle_fraction: float
    volume_forward_mean: float
    volume_forward_max: float
    volume_backward_mean: float
    volume_backward_max: float
    messages_forward_max: int
    live_buffers_forward: float
    live_buffers_backward: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def cost(plan: Plan) -> PlanCost:
    """The figures of a forward plan."""
    back = backward(plan)
    work = [
        [step_work(plan, rank, idx) for rank in range(plan.num_ranks)]
        for idx in range(plan.num_steps)
    ]
    critical = sum((max(step) for step in work), Fraction(0))
    total = sum((sum(step) for step in work), Fraction(0))
    computing = [idx for idx, step in enumerate(work) if any(step)]
    forward_sent, backward_sent = sent_per_rank(plan), sent_per_rank(back)
    ranks = range(plan.num_ranks)
    return PlanCost(
        steps=len(computing),
        tail_steps=plan.num_steps - 1 - computing[-1],
        critical_path=float(critical),
        idle_fraction=float(1 - total / (critical * plan.num_ranks)),
        volume_forward_mean=float(sum(forward_sent) / plan.num_ranks),
        volume_forward_max=float(max(forward_sent)),
        volume_backward_mean=float(sum(backward_sent) / plan.num_ranks),
        volume_backward_max=float(max(backward_sent)),
        messages_forward_max=max(
            sum(len(step.sends) for step in plan.steps[rank]) for rank in ranks
        ),
        live_buffers_forward=float(max(live_buffers(plan, rank) for rank in ranks)),
        live_buffers_backward=float(max(live_buffers(back, rank) for rank in ranks)),
    )


def chunk_tokens(plan: Plan) -> Fraction:
    """n, the mean number of tokens per rank."""
    return Fraction(plan.layout.num_tokens, plan.num_ranks)


def task_work(plan: Plan, task: Task) -> Fraction:
    """Blocks; pairs on the mask's right edge count one half, so that n causal tokens cost n²/2."""
    left, right = plan.mask.band_of(task.kind)
    pairs = band_pairs(task.queries, task.keys, left, right)
    area = pairs - Fraction(band_edge(task.queries, task.keys, right), 2)
    return area / chunk_tokens(plan) ** 2 * Fraction(len(task.heads), plan.num_kv_heads)


def step_work(plan: Plan, rank: int, step_idx: int) -> Fraction:
    """Blocks that the rank computes in the step."""
    return sum((task_work(plan, task) for task in plan.steps[rank][step_idx].tasks), Fraction(0))


def payload_width(plan: Plan, payload: Payload) -> Fraction:
    """Size of one token's payload with all heads, in query widths (query heads × head dim)."""
    kv_width = 2 * Fraction(plan.num_kv_heads, plan.num_heads)
    return {
        Payload.QUERY: Fraction(1),
        Payload.KEY_VALUE: kv_width,
        Payload.PARTIAL: Fraction(1),
        Payload.QUERY_GRAD: Fraction(2),
        Payload.DQ: Fraction(1),
        Payload.DKV: kv_width,
    }[payload]


def sent_per_rank(plan: Plan) -> list[Fraction]:
    """Chunks that each rank sends in this one direction of the plan."""
    return [
        sum(
            (volume(plan, transfer) for step in steps for transfer in step.sends),
            Fraction(0),
        )
        for steps in plan.steps
    ]


def volume(plan: Plan, transfer: Transfer) -> Fraction:
    """Chunks that a transfer moves."""
    return _volume(plan, transfer.payload, len(transfer.tokens), len(transfer.heads))


def live_buffers(plan: Plan, rank: int) -> Fraction:
    """Chunks that the rank's slots take together."""
    sizes: dict[tuple[Payload, int], Fraction] = defaultdict(Fraction)
    for payload, slot, tokens, heads in plan.contents(rank):
        volume = _volume(plan, payload, len(tokens), len(heads))
        sizes[payload, slot] = max(sizes[payload, slot], volume)
    return sum(sizes.values(), Fraction(0))


def bytes_per_chunk(plan: Plan, head_dim: int, bytes_per_element: int) -> float:
    """Bytes of one unit of volume."""
    return float(chunk_tokens(plan)) * plan.num_heads * head_dim * bytes_per_element


def _volume(plan: Plan, payload: Payload, num_tokens: int, num_heads: int) -> Fraction:
    share = Fraction(num_heads, plan.num_kv_heads)
    return num_tokens / chunk_tokens(plan) * share * payload_width(plan, payload)
