"""Native communication: the transfers of a plan on streams of their own, by the C++ module (cpp/).

The walk over the plan, the block kernels and the order of the merges are the reference executor's;
only its transport is another. So results are the same bits.

A plan is flattened once per shape; after that every call hands over pointers only, and the host
never waits.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distflash.plan.plan import Plan, Transfer
from megatron_distflash.runtime.flat import Shape, flatten, num_bytes, offsets, place_slots
from megatron_distflash.runtime.program import Wire

# Forward and backward of eight shapes: sequence lengths change rarely, buffers are large. Those of
# CUDA graphs come on top, since replays need them.
MAX_PLANS = 16

_EXIT_PATIENCE_S = 2.0
_TRIAL_BYTES, _TRIAL_TURNS = 1 << 20, 4

_log = logging.getLogger(__name__)


def module() -> ModuleType:
    """The C++ module. RuntimeError if this installation has none."""
    try:
        from megatron_distflash.runtime import _native
    except ImportError as error:
        raise RuntimeError(
            f"megatron-distflash was built without its native module ({error}): install it where "
            "g++ and pybind11 are found, or use --distflash-comm torch."
        ) from error
    return _native


@dataclass(frozen=True, slots=True)
class Options:
    """How transfers share the GPU with attention. For NCCL its own environment variables
    (NCCL_MAX_CTAS, NCCL_CGA_CLUSTER_SIZE, …) overrule these.

    Attributes:
        late: post a step's transfers after its kernels, not before: for kernels whose blocks leave
            the GPU from time to time, so that transfers get in. Where all streams share one queue
            (CUDA_DEVICE_MAX_CONNECTIONS=1), a kernel posted behind transfers waits until those
            before them have ended; late ones have a whole step for that. None: for NCCL with our
            own kernels.
        hold: for which transfers of a call compute waits until they have begun, since kernels that
            occupy every multiprocessor keep out what comes later: ``never``, ``first`` or
            ``always``; None: ``first`` for NCCL; never for copies, which are short and else wait
            for peers. Late ones never hold compute.
        max_ctas: multiprocessors that transfers occupy at most.
        cga_cluster_size: CTAs that must be scheduled together; 0: each by itself.
        is_blocking: let NCCL's calls block until they are done. The others answer "in progress" and
            take several times as long, since NCCL starts a thread for each.
    """

    late: bool | None = None
    hold: str | None = None
    max_ctas: int = 2
    cga_cluster_size: int = 0
    is_blocking: bool = True


class NativeExecutor:
    """One rank's native communication within a group. Making and closing one is collective.

    Several groups, and several executors for one group, live side by side. An executor does not
    keep its group alive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        comm: str,
        device: torch.device,
        *,
        timeout_s: float,
        options: Options | None = None,
    ) -> None:
        """
        Args:
            comm: ``nccl`` or ``copy``.
            device: this rank's GPU, and the current device.
            timeout_s: how long a group of transfers may take once it can start.

        Raises:
            RuntimeError: on every rank, if one of them cannot; says which and why.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._group, self._device = ref(group), device
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._timeout_s = timeout_s
        self._late = None if options is None else options.late
        self._transports: OrderedDict[tuple, tuple[Plan, NativeTransport]] = OrderedDict()
        self._communicator = self._connect(comm, timeout_s, options or Options())
        self._is_closed = False

    def transport(self, plan: Plan, k: Tensor) -> NativeTransport:
        """The transport for a plan and tensors like ``k`` [n, b, g, d]; collective the first time.

        Raises:
            RuntimeError: on every rank, if one of them lacks memory.
        """
        key = (id(plan), Shape.of(k))
        if key not in self._transports:
            self._transports[key] = plan, self._make_transport(plan, Shape.of(k))
        self._transports.move_to_end(key)
        passing = [key for key, (_, kept) in self._transports.items() if not kept.was_captured]
        if len(passing) > MAX_PLANS:
            _, oldest = self._transports.pop(passing[0])
            oldest.close(self._barrier)
        return self._transports[key][1]

    def try_out(self) -> None:
        """Move bytes between all pairs of ranks at once, and compare them; collective.

        Raises:
            RuntimeError: on every rank, if they arrived otherwise anywhere.
        """
        peers = [peer for peer in range(self._num_ranks) if peer != self._rank]
        places = [peer * _TRIAL_BYTES for peer in peers]
        behind = self._num_ranks * _TRIAL_BYTES  # where what is sent is staged, by target
        transfers = []
        for peer, place in zip(peers, places, strict=True):
            ends = (0, 1, True, peer, f"trial bytes, rank {self._rank} to rank {peer}")
            transfers.append((*ends, [(_TRIAL_BYTES, behind + place, 0)]))
            ends = (0, 1, False, peer, f"trial bytes, rank {peer} to rank {self._rank}")
            staged = behind + self._rank * _TRIAL_BYTES
            transfers.append((*ends, [(_TRIAL_BYTES, place, staged)]))
        executor = self._agree(
            lambda: module().Executor(self._communicator, "trial", 1, 2 * behind, transfers),
            undo=lambda made: made.close(),
        )[self._rank]
        stream = stream_of(self._device)
        landed = _bytes_at(executor.workspace, 2 * behind, self._device)

        def move() -> None:
            wrong = set()  # no rank stops before the others have what it sends
            for turn in range(_TRIAL_TURNS):
                sent = [_trial_bytes(self._rank, peer, turn, self._device) for peer in peers]
                executor.open_step(0, [x.data_ptr() for x in sent], stream)
                executor.close_step(stream)
                for peer, place in zip(peers, places, strict=True):
                    wanted = _trial_bytes(peer, self._rank, turn, self._device)
                    if not torch.equal(landed[place : place + _TRIAL_BYTES], wanted):
                        wrong.add(peer)
            if wrong:
                raise RuntimeError(f"what rank {min(wrong)} sent in a trial arrived otherwise")

        try:
            self._map_workspaces(executor)
            self._agree(move)
        finally:
            executor.unmap_workspaces()
            self._barrier()  # memory must outlive its mappings
            executor.close()

    def memory_reserved(self) -> int:
        """Bytes of GPU memory held for transfers, outside of torch's allocator."""
        return self._communicator.memory_reserved_bytes()

    def close(self, *, alone: bool = False) -> None:
        """Give everything back; a second call does nothing.

        Args:
            alone: neither meet the other ranks, some of which may be gone, nor wait for them long.
        """
        if alone:
            self._communicator.close(_EXIT_PATIENCE_S)
        kept = [transport for _, transport in self._transports.values()]
        for transport in kept:
            transport.unmap()
        if self._communicator.is_one_sided and not alone and not self._is_closed:
            self._communicator.unmap_peers()
            self._barrier()  # once for all, since the slowest rank's GPU may take its time
        for transport in kept:
            transport.close(None)
        self._transports.clear()
        self._communicator.close(self._timeout_s)
        self._is_closed = True

    # -- meeting the other ranks ----------------------------------------------------------------

    def _connect(self, comm: str, timeout_s: float, options: Options) -> Any:
        native = self._agree(lambda: _ready(self._device))[self._rank]
        ends = self._rank, self._num_ranks, timeout_s
        unique_id = b""
        if comm == "nccl":
            make_id = native.nccl_unique_id if self._rank == 0 else bytes
            unique_id = self._agree(make_id, share=True)[0]

        def connect() -> Any:
            if comm == "copy":
                return native.Communicator.copy(*ends, options.hold or "never", self._gather)
            limits = options.max_ctas, options.cga_cluster_size, options.is_blocking
            return native.Communicator.nccl(unique_id, *ends, *limits, options.hold or "first")

        return self._agree(connect, undo=lambda made: made.close(0.0))[self._rank]

    def _make_transport(self, plan: Plan, shape: Shape) -> NativeTransport:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention meets a new shape while a CUDA graph is captured, and buffers cannot be "
                "made then: run it once with this shape before the capture."
            )

        def make() -> NativeTransport:
            return _with_room(
                lambda: NativeTransport(
                    self._communicator, plan, shape, self._device, late=self._late
                )
            )

        transport = self._agree(make, undo=lambda made: made.close(None))[self._rank]
        try:
            self._map_workspaces(transport.executor)
        except RuntimeError:  # on every rank
            transport.close(self._barrier)
            raise
        if self._rank == 0:
            _log.info(
                "%s transfers of the %s %s plan: workspace of %.1f MiB, %.1f MiB in all",
                self._communicator.name,
                plan.schedule,
                plan.direction,
                transport.workspace_bytes / 2**20,
                self.memory_reserved() / 2**20,
            )
        return transport

    def _map_workspaces(self, executor: Any) -> None:
        """Let one-sided transfers read everybody's workspace; collective."""
        if self._communicator.is_one_sided:
            handles = self._agree(executor.export_workspace, share=True)
            self._agree(lambda: executor.import_workspaces(handles))

    def _agree(self, make: Callable[[], Any], *, share: bool = False, undo=None) -> list:
        """Run ``make`` on every rank; RuntimeError on all of them if it fails on one.

        Returns:
            By rank, everybody's results if they are to be shared; else this rank's in its place.
        """
        made, problem = None, None
        try:
            made = make()
        except (RuntimeError, ValueError) as error:
            problem = f"rank {self._rank} of the context-parallel group: {error}"
        answers = self._gather((problem, made if share else None))
        problems = [answer[0] for answer in answers if answer[0] is not None]
        if problems:
            if made is not None and undo is not None:
                undo(made)
            raise RuntimeError(problems[0])
        results = [answer[1] for answer in answers]
        results[self._rank] = made
        return results

    def _gather(self, own: Any) -> list:
        group = self._group()
        assert group is not None, "the group ended; None would mean all ranks"
        everybody: list = [None] * self._num_ranks
        dist.all_gather_object(everybody, own, group=group)
        return everybody

    def _barrier(self) -> None:
        self._gather(None)


class NativeTransport:
    """The reference executor's ``Transport`` for one plan and shape, on a C++ executor."""

    def __init__(
        self,
        communicator: Any,
        plan: Plan,
        shape: Shape,
        device: torch.device,
        *,
        late: bool | None = None,
    ) -> None:
        rank = communicator.rank
        self._flat = flatten(plan, rank, shape, staged=communicator.is_one_sided)
        self._slots = place_slots(plan, rank, shape)[0]
        self.device = device
        name = f"{plan.schedule} {plan.direction}"
        workspace_bytes, transfers = self._flat.workspace_bytes, self._flat.transfers
        self.executor = module().Executor(
            communicator, name, plan.num_steps, workspace_bytes, transfers
        )
        self._one_sided = communicator.is_one_sided
        self._late = False if late is None and self._one_sided else late
        if self._late is not None:
            self.executor.set_late(self._late)
        self._workspace = _bytes_at(self.executor.workspace, workspace_bytes, device)
        # By the transfers' identities, whose hashes take longer than all the rest; with the
        # transfers, so that no other one gets theirs.
        self._targets: dict[int, tuple[Transfer, list[Tensor]]] = {}
        self._held: dict[int, list[Tensor]] = {}
        self._step_idx = -1
        self.was_captured = False
        self.tapes: dict = {}  # see ``tape``

    @property
    def workspace_bytes(self) -> int:
        return self._flat.workspace_bytes

    def targets(self, transfer: Transfer, wires: list[Wire], device: torch.device) -> list[Tensor]:
        found = self._targets.get(id(transfer))
        if found is None:
            tensors = [
                self._workspace[place : place + num_bytes(wire)].view(wire.dtype).view(wire.shape)
                for place, wire in zip(self.places(transfer, wires), wires, strict=True)
            ]
            found = self._targets[id(transfer)] = transfer, tensors
        return found[1]

    def places(self, transfer: Transfer, wires: list[Wire]) -> list[int]:
        """Where in the workspace the transfer's tensors begin, in bytes."""
        start = self._slots[transfer.payload, transfer.target_slot]
        return offsets([num_bytes(wire) for wire in wires], start)[0]

    def expect(self, gives_way: bool) -> None:
        """Before a call. ``gives_way``: its kernels let transfers in that come behind them."""
        if self._late is None:
            self.executor.set_late(gives_way)

    def post(self, step_idx, sends, receives) -> None:
        if step_idx == 0:
            self._note_capture()
        tensors = [tensor for _, tensors in sends for tensor in tensors]
        self._step_idx = step_idx
        # What a call that failed held stays: nobody knows when the GPU is done with it.
        self._held.setdefault(step_idx, tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        self.executor.open_step(step_idx, pointers, stream_of(self.device))

    def wait(self) -> None:
        num_done = self.executor.close_step(stream_of(self.device))
        self._held = {step: held for step, held in self._held.items() if step >= num_done}

    def play(self, tape: Any, buffers: list[int], tensors: list[Tensor]) -> None:
        """A whole call, as the tape says. ``buffers``: addresses in ``tensors``, which transfers
        may read after an error too."""
        self._note_capture()
        self._held = self._held or {0: tensors}  # as in ``post``
        if self.device.type == "cpu":
            tape.run(buffers, 0)
        else:
            with torch.cuda.device(self.device.index):
                tape.run(buffers, stream_of(self.device))
        self._held.clear()

    def unmap(self) -> None:
        """Let go of the peers' workspaces. Memory must outlive its mappings: a rank closes when all
        have unmapped."""
        self._targets.clear()
        self.tapes.clear()
        if self._one_sided:
            self.executor.unmap_workspaces()

    def close(self, barrier: Callable[[], None] | None) -> None:
        """Give the workspace back. ``barrier`` joins the ranks; None: they have met since they
        unmapped, or some of them are lost."""
        self.unmap()
        if self._one_sided and barrier is not None:
            barrier()
        self.executor.close()

    def _note_capture(self) -> None:
        if self.was_captured or self.device.type == "cpu":
            return
        if torch.cuda.is_current_stream_capturing():
            self.was_captured = True
            _log.warning(
                "attention's transfers are captured in a CUDA graph. Replays run without the host, "
                "so the watchdog cannot see them: if a rank dies in one, the others wait for it "
                "until something else ends them."
            )


def stream_of(device: torch.device) -> int:
    """The current stream's handle; 0, the calling thread, on the CPU."""
    if device.type == "cpu":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # makes no Stream object


def _trial_bytes(source: int, target: int, turn: int, device: torch.device) -> Tensor:
    """Others for each pair of ranks and turn: [_TRIAL_BYTES] uint8."""
    place = torch.arange(_TRIAL_BYTES, device=device)
    return ((place * (2 * source + 3) + 11 * target + 5 * turn) % 251).to(torch.uint8)


def _ready(device: torch.device) -> ModuleType:
    """The module, and a CUDA context for it to take over."""
    native = module()
    if not native.with_cuda:
        raise RuntimeError(
            "megatron-distflash was built without GPU transports: install it where cuda.h and "
            "nccl.h are found, or use --distflash-comm torch."
        )
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise RuntimeError(f"tensors are on {device}, but the current device is cuda:{current}")
    torch.cuda.current_stream().synchronize()
    return native


def _with_room(make: Callable[[], NativeTransport]) -> NativeTransport:
    """Our buffers are not torch's: if they do not fit, torch lets go of what it keeps for later."""
    try:
        return make()
    except RuntimeError:
        torch.cuda.empty_cache()
        return make()


class _CudaBytes:
    """Device memory as numba, cupy and torch take it from each other."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Memory that is not torch's as a uint8 tensor [num_bytes]."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(array, dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, num_bytes), device=device)
