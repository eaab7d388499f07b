"""Which transport carries a group's transfers: the choice, made once per group, and its keeping.

``nccl`` and ``copy`` are the native ones (``native``), ``torch`` is torch.distributed's
point-to-point operations. ``auto`` takes copy engines where every rank has a GPU of its own in one
node, can map the others' memory and gets the right bytes from them in a trial; NCCL elsewhere; and
torch.distributed on the CPU or where the native module is missing, which it says in the log. With
CUDA_DEVICE_MAX_CONNECTIONS=1 it leaves copies alone: their waits for peers then stop the kernels
behind them in the only queue.
"""

import logging
import os
import socket
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distflash.plan import Plan
from megatron_distflash.runtime.native import NativeExecutor
from megatron_distflash.runtime.reference import NoTransport, TorchTransport, Transport

COMMS = ("auto", "nccl", "copy", "torch")
DEFAULT_TIMEOUT_S = 600.0
TRIAL_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)

# [group][comm, timeout_s, device]; None: torch.distributed. Nothing here keeps a group alive: when
# the last one else to hold it lets go (``destroy_process_group``), its executors are closed.
_executors: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, NativeExecutor | None]]
_executors = WeakKeyDictionary()
# [executor] what closes it when its group ends, which keeps it alive until then.
_finalizers: WeakKeyDictionary[NativeExecutor, finalize] = WeakKeyDictionary()


def transport_for(
    group: dist.ProcessGroup | None, comm: str, timeout_s: float, plan: Plan, k: Tensor
) -> Transport:
    """The transport of a call with this plan and tensors like ``k``; collective the first time.

    Raises:
        RuntimeError: on every rank, if ``comm`` is a native transport that one of them cannot use.
    """
    if group is None:
        return NoTransport()
    if comm == "torch" or not k.is_cuda:
        return TorchTransport(group)
    made = _executors.setdefault(group, {})
    key = (comm, timeout_s, k.device)
    if key not in made:
        made[key] = _choose(group, comm, timeout_s, k.device)
    executor = made[key]
    return TorchTransport(group) if executor is None else executor.transport(plan, k)


def problem_with(comm: str, timeout_s: float, device: torch.device) -> str | None:
    """Why a call cannot use ``comm`` on ``device``; None: it can, as far as one rank knows."""
    if comm not in COMMS:
        return f"comm must be one of {', '.join(COMMS)}, not {comm!r}"
    if not timeout_s > 0:
        return f"the timeout must be more than 0 seconds, not {timeout_s}"
    if comm in ("nccl", "copy") and device.type != "cuda":
        return f"comm {comm!r} moves GPU memory, but the tensors are on {device.type}"
    return None


def memory_reserved(group: dist.ProcessGroup) -> int:
    """Bytes of GPU memory that this rank holds for the group's transfers, outside of torch."""
    return sum(made.memory_reserved() for made in _executors.get(group, {}).values() if made)


def close(group: dist.ProcessGroup) -> None:
    """Give back all that the group's transfers hold. Collective; a later call starts afresh."""
    for executor in _executors.pop(group, {}).values():
        if executor is not None:
            executor.close()
            _finalizers.pop(executor).detach()


def _choose(
    group: dist.ProcessGroup, comm: str, timeout_s: float, device: torch.device
) -> NativeExecutor | None:
    if comm != "auto":
        return _make(group, comm, timeout_s, device)
    candidates = ("copy", "nccl") if _suits_copies(group, device) else ("nccl",)
    for candidate in candidates:
        try:
            if candidate == "copy":  # what a node lets GPUs do to each other's memory varies
                _try_out(group, candidate, min(timeout_s, TRIAL_TIMEOUT_S), device)
            return _make(group, candidate, timeout_s, device)
        except RuntimeError as error:  # on every rank alike
            _log.warning("distflash: no %s transfers: %s", candidate, error)
    _log.warning("distflash: transfers go through torch.distributed")
    return None


def _make(
    group: dist.ProcessGroup, comm: str, timeout_s: float, device: torch.device
) -> NativeExecutor:
    executor = NativeExecutor(group, comm, device, timeout_s=timeout_s)
    # At exit too: communicators end before the driver and NCCL are torn down. The other ranks may
    # be gone by then.
    _finalizers[executor] = finalize(group, executor.close, alone=True)
    if dist.get_rank(group) == 0:
        _log.info("distflash: transfers go through %s", comm)
    return executor


def _try_out(group: dist.ProcessGroup, comm: str, timeout_s: float, device: torch.device) -> None:
    """In an executor that is there for the trial alone: bytes that never arrive are not waited for
    as long as a rank that may be late."""
    executor = NativeExecutor(group, comm, device, timeout_s=timeout_s)
    try:
        executor.try_out()
    except RuntimeError:
        executor.close(alone=True)
        raise
    executor.close()


def _suits_copies(group: dist.ProcessGroup, device: torch.device) -> bool:
    """The same answer on every rank: all in one node, each with a GPU and several queues to it."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    own = (socket.gethostname(), gpu, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1")
    answers: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, own, group=group)
    nodes, gpus = {node for node, _, _ in answers}, {gpu for _, gpu, _ in answers}
    has_queues = all(several for _, _, several in answers)
    return len(nodes) == 1 and len(gpus) == len(answers) and has_queues
