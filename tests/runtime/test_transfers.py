"""What goes over the wire is what the plan says and nothing more, and runs repeat bit by bit.

Counted where the reference executor meets torch.distributed.
"""

from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_distflash.plan import SCHEDULES, Payload, Plan, build, build_backward
from megatron_distflash.plan.cost import bytes_per_chunk, sent_per_rank
from megatron_distflash.runtime.attention import dist_flash_attention
from tests.runtime.ranks import NAMES, Case, attend_on_rank, check, gather

# Tensors of one token's payload with one KV head: how many elements of the input's dtype, and how
# many of the state's (LSE, delta). g: query heads of a KV head, d: head dim.
SIZES = {
    Payload.QUERY: [("g", "d")],
    Payload.KEY_VALUE: [("d",), ("d",)],
    Payload.PARTIAL: [("g", "d"), ("g", "row")],
    Payload.QUERY_GRAD: [("g", "d"), ("g", "d"), ("g", "row"), ("g", "row")],
    Payload.DQ: [("g", "d")],
    Payload.DKV: [("d",), ("d",)],
}


class Message(NamedTuple):
    is_send: bool
    peer: int
    num_bytes: int


def messages_of_plan(plan: Plan, rank: int, case: Case) -> list[list[Message]]:
    """Step by step, without the steps that move nothing."""
    steps = []
    for step in plan.steps[rank]:
        messages = [
            Message(is_send, t.target if is_send else t.source, num_bytes)
            for is_send, transfers in ((True, step.sends), (False, step.receives))
            for t in transfers
            for num_bytes in message_bytes(t, case)
        ]
        if messages:
            steps.append(messages)
    return steps


def message_bytes(transfer, case: Case) -> list[int]:
    element = case.dtype.itemsize
    factors = {
        "g": case.heads[0] // case.heads[1],
        "d": case.head_dim * element,
        "row": max(4, element),
    }
    count = len(transfer.tokens) * len(transfer.heads) * case.batch
    sizes = []
    for names in SIZES[transfer.payload]:
        size = count
        for name in names:
            size *= factors[name]
        sizes.append(size)
    return sizes


def attend_counted(rank, group, case: Case) -> tuple[list, list]:
    """The messages that the forward and the backward post, step by step."""
    posted: list[list[Message]] = []
    post = dist.batch_isend_irecv

    def record(operations):
        posted.append(
            [Message(o.op is dist.isend, o.group_peer, o.tensor.nbytes) for o in operations]
        )
        return post(operations)

    q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with mock.patch.object(dist, "batch_isend_irecv", record):
        out = dist_flash_attention(*leaves, group=group, **case.options)
        num_forward = len(posted)
        out.backward(dout)
    return posted[:num_forward], posted[num_forward:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_messages_are_the_plans(ranks, seed, num_ranks, schedule, dtype):
    case = Case(seed, (8,) * num_ranks, (8, 2), schedule, batch=2, dtype=dtype)
    options = {"num_heads": 8, "num_kv_heads": 2, "mask": case.mask}
    plans = [builder(schedule, case.lengths, **options) for builder in (build, build_backward)]
    posted = ranks.run(attend_counted, case, world=num_ranks)
    for direction, plan in enumerate(plans):
        for rank in range(num_ranks):
            assert posted[rank][direction] == messages_of_plan(plan, rank, case), (rank, case)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_sent_bytes_are_what_the_cost_model_says(ranks, seed, schedule):
    """In bf16, LSE and delta aside, which are one float32 per row and head."""
    case = Case(seed, (8,) * 4, (8, 2), schedule, head_dim=16, dtype=torch.bfloat16)
    options = {"num_heads": 8, "num_kv_heads": 2, "mask": case.mask}
    posted = ranks.run(attend_counted, case, world=4)
    for direction, builder in enumerate((build, build_backward)):
        plan = builder(schedule, case.lengths, **options)
        chunk = bytes_per_chunk(plan, case.head_dim, 2)
        for rank, volume in enumerate(sent_per_rank(plan)):
            sent = [m for step in posted[rank][direction] for m in step if m.is_send]
            rows = sum(
                4 * len(t.tokens) * len(t.heads) * 4 * {"out": 1, "qdo": 2}.get(t.payload, 0)
                for step in plan.steps[rank]
                for t in step.sends
            )
            assert sum(m.num_bytes for m in sent) - rows == volume * chunk


def test_one_rank_sends_nothing(ranks, seed):
    assert ranks.run(attend_counted, Case(seed, (8,)), world=1) == [([], [])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_two_runs_are_equal_bit_by_bit(ranks, seed, schedule, dtype):
    case = Case(seed, (24, 17, 30, 1, 24), (4, 2), schedule, head_dim=16, dtype=dtype)
    first, second = (ranks.run(attend_on_rank, case, world=5) for _ in range(2))
    for rank in range(5):
        for name in NAMES:
            assert torch.equal(first[rank][name], second[rank][name]), (name, rank, case)


def attend_in_two_groups(rank, group, cases: dict[tuple[int, ...], Case]) -> dict:
    """Attention in two groups at once, whose ranks are not the world's ranks."""
    groups = {members: dist.new_group(members) for members in cases}
    members = next(members for members in cases if rank in members)
    return attend_on_rank(members.index(rank), groups[members], cases[members])


def test_groups_of_any_ranks(ranks, seed):
    """As with tensor or data parallelism next to context parallelism."""
    cases = {
        (1, 3, 4, 6): Case(seed, (5, 6, 7, 8)),
        (0, 2, 5, 7): Case(seed + 1, (4,) * 4, schedule="zigzag"),
    }
    parts = ranks.run(attend_in_two_groups, cases)
    for members, case in cases.items():
        check(case, gather(case, [parts[rank] for rank in members]))
