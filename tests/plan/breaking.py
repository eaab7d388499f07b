"""Valid plans and small changes to break them; every change returns a new plan.

The plans, as ``format_grid`` prints them (chunks of 8 tokens; of 4 in zigzag; 4 KV heads):

    balanced                                              zigzag, 2 ranks
    rank  step 0  step 1        step 2  step 3  step 4    rank  step 0             step 1
    0     q0·k0   q2·k0[h2:4]*  q3·k0*  ~       .         0     q0·k0 q3·k0 q3·k3  q3·k1 q3·k2
    1     q1·k1   q3·k1[h2:4]*  q1·k0   .       .         1     q1·k1 q2·k1 q2·k2  q1·k0 q2·k0
    2     q2·k2   q2·k0[h0:2]   q2·k1   +       .
    3     q3·k3   q3·k1[h0:2]   q3·k2   +       +
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_distflash.plan import Mask, Payload, Plan, PlanError, build, build_backward, validate
from megatron_distflash.plan.grid import format_grid
from megatron_distflash.plan.plan import Output, Step, Transfer
from megatron_distflash.plan.spans import Span

HEADS = {"num_heads": 8, "num_kv_heads": 4}
PLAIN = {**HEADS, "prefetch": 1, "cut": False}
ALL_HEADS = Span(0, 4)
OWN_STATE = (Output(Payload.PARTIAL, None, True),)


def balanced() -> Plan:
    return build("balanced", (8,) * 4, **PLAIN, mask=Mask.causal())


def balanced_backward() -> Plan:
    return build_backward("balanced", (8,) * 4, **PLAIN, mask=Mask.causal())


def zigzag() -> Plan:
    return build("zigzag", (8, 8), **PLAIN, mask=Mask.causal())


def zigzag_backward() -> Plan:
    return build_backward("zigzag", (8, 8), **PLAIN, mask=Mask.causal())


def window() -> Plan:
    """Rank 1 reads tokens 5:8 of rank 0 in step 1."""
    return build("ring", (8, 8), **PLAIN, mask=Mask.sliding_window(4))


def packed() -> Plan:
    return build("ring", (8, 8), **PLAIN, mask=Mask.packed((0, 4, 8, 16)))


def expect(broken: Plan, message: str, rank: int, step: int | None) -> None:
    """``validate`` refuses the plan with this message, names the place and shows it."""
    with pytest.raises(PlanError) as caught:
        validate(broken)
    where = f" on rank {rank}" + ("" if step is None else f" in step {step}")
    text, grid = str(caught.value).split("\n", 1)
    assert text.startswith(f"{broken.schedule} {broken.direction} plan{where}: ")
    assert message in text
    assert grid == format_grid(broken, mark=(rank, step))


Change = Callable[[tuple], tuple]  # of a step's sends, receives, merges or tasks


def drop(idx: int) -> Change:
    return lambda items: items[:idx] + items[idx + 1 :]


def double(idx: int) -> Change:
    return lambda items: (*items[: idx + 1], items[idx], *items[idx + 1 :])


def add(item) -> Change:
    return lambda items: (*items, item)


def adjust(idx: int, **fields) -> Change:
    return lambda items: (*items[:idx], replace(items[idx], **fields), *items[idx + 1 :])


def reverse(items: tuple) -> tuple:
    return items[::-1]


def change(plan: Plan, rank: int, step_idx: int, **changes: Change) -> Plan:
    """Apply ``changes``, by the names of Step's fields, to one cell of the plan."""
    step = plan.steps[rank][step_idx]
    step = replace(step, **{name: apply(getattr(step, name)) for name, apply in changes.items()})
    return put(plan, rank, step_idx, step)


def put(plan: Plan, rank: int, step_idx: int, step: Step) -> Plan:
    steps = [list(row) for row in plan.steps]
    steps[rank][step_idx] = step
    return replace(plan, steps=tuple(map(tuple, steps)))


def transfer_of(plan: Plan, step_idx: int, source: int, target: int, idx: int = 0) -> Transfer:
    """The idx-th transfer between two ranks in a step."""
    sends = plan.steps[source][step_idx].sends
    return [transfer for transfer in sends if transfer.target == target][idx]


def insert(plan: Plan, step_idx: int, transfer: Transfer) -> Plan:
    """Add a transfer on both sides."""
    plan = change(plan, transfer.source, step_idx, sends=add(transfer))
    return change(plan, transfer.target, step_idx, receives=add(transfer))


def remove(plan: Plan, step_idx: int, transfer: Transfer) -> Plan:
    """Take a transfer away on both sides."""

    def without(items: tuple) -> tuple:
        return tuple(item for item in items if item != transfer)

    plan = change(plan, transfer.source, step_idx, sends=without)
    return change(plan, transfer.target, step_idx, receives=without)


def remake(plan: Plan, step_idx: int, transfer: Transfer, **fields) -> Plan:
    """Change a transfer on both sides; it goes to the end of its step's transfers."""
    return insert(remove(plan, step_idx, transfer), step_idx, replace(transfer, **fields))


def delay(plan: Plan, step_idx: int, transfer: Transfer, later: int) -> Plan:
    """Post a transfer in another step."""
    return insert(remove(plan, step_idx, transfer), later, transfer)


def input_transfer(payload: Payload, tokens, heads, ends: tuple[int, int], slot: int) -> Transfer:
    """A transfer of an owner's own tensors, from ``ends[0]`` to ``ends[1]``."""
    return Transfer(payload, tokens, heads, *ends, None, slot)
