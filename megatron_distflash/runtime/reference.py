"""The reference executor: walks a rank's program, over any transport; readable first.

Every rank of the group calls ``forward`` (and later ``backward``) with the same plan and its own
local tensors; shapes as in ``kernel``, tokens in the order the plan's layout gives them. What
depends on the plan alone is in the ``program``, since the host must be quicker than the GPU.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from megatron_distflash.plan.plan import Payload, Plan, Transfer
from megatron_distflash.plan.validate import describe
from megatron_distflash.runtime.kernel import BackwardBlock, ForwardBlock, Rows, State
from megatron_distflash.runtime.program import (
    OWN,
    Fold,
    Launch,
    Program,
    Receive,
    Send,
    Target,
    View,
    Wire,
    program_of,
)
from megatron_distflash.runtime.state import (
    add,
    cast,
    delta_of,
    heads_first,
    rounded,
    store,
    uninitialised_state,
    zero_sums,
)

_UNNAMED = nullcontext()


class Transport(Protocol):
    """Moves the transfers of one step. Calls alternate: post, wait, post, wait, …"""

    def targets(self, transfer: Transfer, wires: list[Wire], device: torch.device) -> list[Tensor]:
        """Contiguous tensors to receive the transfer into; valid until the slot is used again."""

    def post(
        self,
        step_idx: int,
        sends: list[tuple[Transfer, list[Tensor]]],
        receives: list[tuple[Transfer, list[Tensor]]],
    ) -> None:
        """Start a step's transfers as one group; tensors are contiguous and live until ``wait``."""

    def wait(self) -> None:
        """Make the received data visible to the current stream (or the host, for CPU tensors)."""


class TorchTransport:
    """torch.distributed point-to-point operations; any backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._held: list[Tensor] = []
        self._moving: tuple[int, list[Transfer]] = (0, [])

    def targets(self, transfer, wires, device) -> list[Tensor]:
        return [torch.empty(wire.shape, dtype=wire.dtype, device=device) for wire in wires]

    def post(self, step_idx, sends, receives) -> None:
        operations = [
            dist.P2POp(dist.isend, tensor, group=self._group, group_peer=transfer.target)
            for transfer, tensors in sends
            for tensor in tensors
        ]
        operations += [
            dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=transfer.source)
            for transfer, tensors in receives
            for tensor in tensors
        ]
        self._held = [operation.tensor for operation in operations]
        self._moving = step_idx, [transfer for transfer, _ in [*sends, *receives]]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            step_idx, transfers = self._moving
            moving = "; ".join(map(describe, transfers))
            raise RuntimeError(f"step {step_idx} did not move ({moving}): {error}") from error
        self._works, self._held = [], []


class NoTransport:
    """For one rank: there is nothing to move."""

    def targets(self, transfer, wires, device) -> list[Tensor]:
        raise AssertionError("one rank receives nothing")

    def post(self, step_idx, sends, receives) -> None:
        assert not sends and not receives

    def wait(self) -> None:
        pass


def forward(
    plan: Plan,
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    kernel: str,
    transport: Transport,
) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence for this rank's queries.

    Returns:
        out [n, b, h, d] in q's dtype, lse [n, b, h] in the state's.
    """
    walk = _Forward(program_of(plan, rank, kernel, k), transport, scale, q, k, v)
    walk.run()
    return walk.finished()


def backward(
    plan: Plan,
    rank: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    kernel: str,
    transport: Transport,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for this rank's tokens, in q's dtype, by the backward plan."""
    program = program_of(plan, rank, kernel, k)
    queries = q, dout, lse, delta_of(out, dout)
    walk = _Backward(program, transport, scale, queries, (k, v), out)
    walk.run()
    return walk.finished()


class _Walk:
    """Walks a rank's steps; subclasses compute the blocks and fold in what arrives.

    ``held``: each place's tensors.
    """

    def __init__(self, program: Program, transport: Transport, scale: float) -> None:
        self.program, self.transport, self.scale = program, transport, scale
        self.held: list[tuple[Tensor, ...]] = [()] * program.num_places

    def run(self) -> None:
        named = torch.profiler.record_function if profiler._is_profiler_enabled else _unnamed
        held, transport = self.held, self.transport
        for step_idx, step in enumerate(self.program.steps):
            sends = [(send.transfer, self._outgoing(send)) for send in step.sends]
            receives = [(receive.transfer, self._incoming(receive)) for receive in step.receives]
            with named(step.post_label):
                transport.post(step_idx, sends, receives)
            for fold in step.folds:
                arrived, held[fold.place] = held[fold.place], ()
                self.fold(fold, arrived)
            for launch in step.launches:
                with named(launch.label):
                    self.compute(launch)
            transport.wait()

    def compute(self, launch: Launch) -> None:
        raise NotImplementedError

    def fold(self, fold: Fold, arrived: tuple[Tensor, ...]) -> None:
        """Add a received result to the state of the rank's own rows."""
        raise NotImplementedError

    def view(self, view: View) -> tuple[Tensor, ...]:
        tensors = self.held[view.place]
        if view.pieces is None:
            return tensors
        return tuple([piece.of(x) for piece, x in zip(view.pieces, tensors, strict=True)])

    def keep(self, target: Target, result: tuple[Tensor, ...]) -> None:
        """The result takes the target's place, unless it was added to the rank's own state."""
        if target.is_made or not target.is_own:
            self.held[target.view.place] = result

    # -- transfers ------------------------------------------------------------------------------

    def _outgoing(self, send: Send) -> list[Tensor]:
        tensors = self.view(send.view)
        return [_wired(x, wire) for x, wire in zip(tensors, send.wires, strict=True)]

    def _incoming(self, receive: Receive) -> list[Tensor]:
        device = self.held[OWN[Payload.KEY_VALUE]][0].device
        tensors = self.transport.targets(receive.transfer, receive.wires, device)
        self.held[receive.place] = tuple([_unwired(x) for x in tensors])
        return tensors


class _Forward(_Walk):
    """The state of the own rows: (running output, LSE); ``out`` takes what is final."""

    def __init__(
        self, program: Program, transport: Transport, scale: float, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        super().__init__(program, transport, scale)
        self.held[OWN[Payload.QUERY]] = (q,)
        self.held[OWN[Payload.KEY_VALUE]] = k, v
        self.results = program.results[Payload.PARTIAL]
        self.out: Tensor | None = None
        if self.results.alone:
            return  # the kernel makes the results
        self.out = q.new_empty(q.shape)
        self.held[OWN[Payload.PARTIAL]] = uninitialised_state(q)
        for view in self.results.unset:
            out, lse = self.view(view)
            out.zero_(), lse.fill_(-torch.inf)

    def finished(self) -> tuple[Tensor, Tensor]:
        acc, lse = self.held[OWN[Payload.PARTIAL]]
        if self.out is None:
            (q,) = self.held[OWN[Payload.QUERY]]
            return rounded(acc, q.dtype), lse
        for view in self.results.unfinished:
            cast(self._final(view), self.view(view)[0])
        return self.out, lse

    def compute(self, launch) -> None:
        blocks = []
        for block in launch.blocks:
            (q,), (k, v) = self.view(block.queries), self.view(block.keys)
            (target,) = block.targets
            blocks.append(ForwardBlock(q, k, v, block.band, self._into(target, q)))
        results = launch.kernel.forward(blocks, self.scale, launch.gives_way)
        for block, result in zip(launch.blocks, results, strict=True):
            self.keep(block.targets[0], result)

    def fold(self, fold, arrived) -> None:
        store(self._state(fold.target), *arrived)

    def _into(self, target: Target, q: Tensor) -> State | None:
        if target.is_made:
            return None
        if target.is_own:
            return self._state(target)
        if target.first:
            self.held[target.view.place] = uninitialised_state(q)
        acc, lse = self.held[target.view.place]
        out = q.new_empty(q.shape) if target.last else None
        return State(acc, lse, out, accumulate=not target.first)

    def _state(self, target: Target) -> State:
        """Of own rows."""
        acc, lse = self.view(target.view)
        out = self._final(target.view) if target.last else None
        return State(acc, lse, out, accumulate=not target.first)

    def _final(self, view: View) -> Tensor:
        """These rows of ``out``, which is of the running output's shape."""
        assert self.out is not None
        return view.first_of(self.out)


class _Backward(_Walk):
    """The state of the own rows: sums of dq and of (dk, dv)."""

    def __init__(
        self,
        program: Program,
        transport: Transport,
        scale: float,
        queries: tuple[Tensor, Tensor, Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        super().__init__(program, transport, scale)
        self.held[OWN[Payload.QUERY_GRAD]] = queries
        self.held[OWN[Payload.KEY_VALUE]] = keys
        self.out = out
        for payload, tensors in ((Payload.DQ, queries[:1]), (Payload.DKV, keys)):
            if not program.results[payload].alone:
                self.held[OWN[payload]] = zero_sums(*tensors)

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = self.out.dtype
        sums = *self.held[OWN[Payload.DQ]], *self.held[OWN[Payload.DKV]]
        dq, dk, dv = (rounded(x, dtype) for x in sums)
        return dq, dk, dv

    def compute(self, launch) -> None:
        blocks = []
        for block in launch.blocks:
            (q, dout, lse, delta), (k, v) = self.view(block.queries), self.view(block.keys)
            out = None if block.is_helped else block.queries.first_of(self.out)
            dq_target, dkv_target = block.targets
            into = *self._into(dq_target, q), *self._into(dkv_target, k, v)
            blocks.append(BackwardBlock(q, k, v, dout, Rows(lse, delta, out), block.band, into))
        results = launch.kernel.backward(blocks, self.scale, launch.gives_way)
        for block, grads in zip(launch.blocks, results, strict=True):
            self.keep(block.targets[0], grads[:1])
            self.keep(block.targets[1], grads[1:])

    def fold(self, fold, arrived) -> None:
        for total, part in zip(self.view(fold.target.view), arrived, strict=True):
            add(total, part)

    def _into(self, target: Target, *like: Tensor) -> tuple[Tensor | None, ...]:
        """The sums to add to; None where the kernel makes them."""
        if target.is_made:
            return (None,) * len(like)
        if target.first and not target.is_own:
            self.held[target.view.place] = zero_sums(*like)
        return self.view(target.view)


def _wired(x: Tensor, wire: Wire) -> Tensor:
    """As it travels."""
    if x.dim() == 3:
        x = heads_first(x)
    return rounded(x, wire.dtype).contiguous()


def _unwired(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1) if x.dim() == 3 else x


def _unnamed(_label: str) -> AbstractContextManager[None]:
    """A range costs the host as much as ten views; without a profiler nobody sees it."""
    return _UNNAMED
