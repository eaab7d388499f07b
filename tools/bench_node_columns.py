"""The columns of tools/bench_node.py attention, as something that one rank can run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_node_cells import NOTHING, Column
from bench_node_problem import Problem, torch_attention
from bench_unmoved import Unmoved
from torch import Tensor

from megatron_distflash.plan import Plan
from megatron_distflash.runtime import comm as transports
from megatron_distflash.runtime import reference
from megatron_distflash.runtime.attention import dist_flash_attention
from megatron_distflash.runtime.program import wires_of

TIMEOUT_S = 30.0


class Runner:
    """One column on one rank: an attention function over the problem's tensors.

    Args:
        call: (q, k, v) → out.
        around: makes the context that forward and backward run in.
    """

    def __init__(
        self,
        problem: Problem,
        layout: str,
        call: Callable[..., Tensor],
        around: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        *self._leaves, self._dout = problem.inputs(layout)
        self._call, self._around = call, around

    def forward(self) -> Tensor:
        with self._around():
            return self._call(*self._leaves)

    def both(self) -> list[Tensor]:
        """out, dq, dk, dv."""
        with self._around():
            out = self._call(*self._leaves)
            grads = torch.autograd.grad(out, self._leaves, self._dout.reshape(out.shape))
        return [out.detach(), *grads]


class TransfersRunner:
    """The transfers of a column with nothing to compute: what they take by themselves."""

    def __init__(self, recorded: list[tuple[Plan, Tensor, reference.Transport]], rank: int) -> None:
        self._walks = [_transfers(*one, rank) for one in recorded]

    def forward(self) -> None:
        self._walks[0]()

    def both(self) -> None:
        for walk in self._walks:
            walk()


def make_runner(
    column: Column, problem: Problem, group: dist.ProcessGroup | None
) -> Runner | TransfersRunner:
    """Collective over the group.

    Raises:
        ValueError, RuntimeError: this column cannot be run here.
    """
    if column.family == "te":
        return Runner(problem, column.layout, _transformer_engine(column.schedule, problem, group))
    if column.family == "alone" and column.kernel in ("cudnn", "flash"):
        kernel = column.kernel
        return Runner(problem, column.layout, lambda q, k, v: torch_attention(q, k, v, kernel))
    if column.kernel == NOTHING:
        with recorded_plans() as recorded:
            Runner(problem, column.layout, _ours(column, group, kernel="auto")).both()
        return TransfersRunner(recorded, problem.rank)
    around = contextlib.nullcontext
    if column.comm == NOTHING:
        unmoved = problem.shared(Unmoved, math.log(problem.cell.tokens * problem.cell.num_ranks))
        around = functools.partial(installed, unmoved)
    return Runner(problem, column.layout, _ours(column, group, column.kernel), around)


def _ours(column: Column, group: dist.ProcessGroup | None, kernel: str) -> Callable[..., Tensor]:
    options = {"group": group, "kernel": kernel, "timeout_s": TIMEOUT_S}
    if column.family == "ours":
        options["schedule"] = column.schedule
        # The transport is exchanged below the attention function, which still wants a name.
        options["comm"] = "torch" if column.comm == NOTHING else column.comm
    return lambda q, k, v: dist_flash_attention(q, k, v, **options)


def _transformer_engine(
    kind: str, problem: Problem, group: dist.ProcessGroup | None
) -> Callable[..., Tensor]:
    if group is None or not torch.cuda.is_available():
        raise ValueError("Transformer Engine's context parallelism needs GPUs")
    try:
        from transformer_engine.pytorch import DotProductAttention
    except ImportError as error:
        raise ValueError(f"Transformer Engine is not installed ({error})") from error
    cell = problem.cell
    module = DotProductAttention(
        cell.heads,
        cell.head_dim,
        num_gqa_groups=cell.kv_heads,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        layer_number=1,
    )
    ranks = dist.get_process_group_ranks(group)
    module.set_context_parallel_group(group, ranks, torch.cuda.Stream(), kind)
    return lambda q, k, v: module(q, k, v, attn_mask_type="causal")


# ---- below the attention function: its transports ------------------------------------------------


@contextlib.contextmanager
def installed(transport: reference.Transport) -> Iterator[None]:
    """Attention gets this transport meanwhile."""
    real = transports.transport_for

    def transport_for(group, comm, timeout_s, plan, k):
        real(group, comm, timeout_s, plan, k)  # for whoever records plans
        return transport

    with mock.patch.object(transports, "transport_for", transport_for):
        yield


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[tuple[Plan, Tensor, reference.Transport]]]:
    """What attention asks transports for meanwhile: (plan, k, transport) per call."""
    found: list[tuple[Plan, Tensor, reference.Transport]] = []
    original = transports.transport_for

    def transport_for(group, comm, timeout_s, plan, k):
        transport = original(group, comm, timeout_s, plan, k)
        found.append((plan, k.detach(), transport))
        return transport

    with mock.patch.object(transports, "transport_for", transport_for):
        yield found


def sent_bytes(plan: Plan, k: Tensor, rank: int) -> int:
    """What the rank sends in this direction of the plan."""
    return sum(
        math.prod(wire.shape) * wire.dtype.itemsize
        for step in plan.steps[rank]
        for transfer in step.sends
        for wire in wires_of(plan, transfer, k.shape[1], k.shape[3], k.dtype)
    )


def _transfers(
    plan: Plan, k: Tensor, transport: reference.Transport, rank: int
) -> Callable[[], None]:
    """One walk over the plan's posts and waits."""
    steps = []
    for step_idx, step in enumerate(plan.steps[rank]):
        ends = []
        for moved, is_send in ((step.sends, True), (step.receives, False)):
            ends.append([])
            for transfer in moved:
                wires = wires_of(plan, transfer, k.shape[1], k.shape[3], k.dtype)
                if is_send:
                    tensors = [torch.randn(w.shape, device=k.device).to(w.dtype) for w in wires]
                else:
                    tensors = transport.targets(transfer, wires, k.device)
                ends[-1].append((transfer, tensors))
        steps.append((step_idx, *ends))

    def run() -> None:
        for step_idx, sends, receives in steps:
            transport.post(step_idx, sends, receives)
            transport.wait()

    return run
