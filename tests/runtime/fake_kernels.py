"""Our CUDA kernels' contract (kernels/api.h) in torch, on the CPU and in any dtype, so that
attention through them is tested without a GPU. Breaking the contract is an AssertionError."""

import contextlib
import math
from unittest import mock

import torch
from torch import Tensor

from megatron_distflash.runtime import blocks, hopper_kernel, program
from megatron_distflash.runtime.cuda_tasks import BackwardTask, ForwardTask, Mask


class FakeKernels:
    """Has the methods of ``CudaKernels`` that attention calls; remembers its launches.

    Attributes:
        launches: how many tasks each launch had.
        shifts: tiles_per_shift of each launch.
        deterministic: of each backward launch.
    """

    def __init__(self) -> None:
        self.launches: list[int] = []
        self.shifts: list[int] = []
        self.deterministic: list[bool] = []

    def forward_accumulate(
        self, tasks: list[ForwardTask], *, softmax_scale: float, tiles_per_shift: int
    ) -> None:
        self.launches.append(len(tasks))
        self.shifts.append(tiles_per_shift)
        runs: list[list[ForwardTask]] = []
        for task in tasks:
            assert task.out_acc is not None or (task.out is not None and not task.accumulate)
            if runs and _range(runs[-1][0]) == _range(task):
                runs[-1].append(task)
            else:
                runs.append([task])
        written: set[int] = set()
        for run in runs:
            rows = _addresses(run[0].lse)
            assert rows.isdisjoint(written), "two ranges of one launch share rows"
            written |= rows
            _forward(run, softmax_scale)

    def backward_accumulate(
        self,
        tasks: list[BackwardTask],
        *,
        softmax_scale: float,
        tiles_per_shift: int,
        deterministic: bool,
    ) -> None:
        self.launches.append(len(tasks))
        self.shifts.append(tiles_per_shift)
        self.deterministic.append(deterministic)
        for task in tasks:
            _backward(task, softmax_scale)


def forget_kernels() -> None:
    """All that remembers which kernel was chosen for what."""
    blocks._chosen.cache_clear()
    program._program.cache_clear()


@contextlib.contextmanager
def on_the_cpu():
    """Attention's kernel ``cuda`` is a fake one, and memory that is not initialised holds NaN."""
    fake = FakeKernels()
    forget_kernels()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    try:
        with (
            mock.patch.object(hopper_kernel, "_kernels", lambda: fake),
            mock.patch.object(hopper_kernel.Hopper, "refusal", lambda *_: None),
        ):
            yield fake
    finally:
        torch.use_deterministic_algorithms(before)
        forget_kernels()


def _range(task: ForwardTask) -> tuple:
    """What tasks that share one pass over their state have in common."""
    views = (task.q, task.out, task.out_acc, task.lse)
    return tuple((x.data_ptr(), x.shape, x.stride()) if x is not None else None for x in views)


def _addresses(x: Tensor) -> set[int]:
    offsets = torch.zeros(x.shape, dtype=torch.int64)
    for dim, stride in enumerate(x.stride()):
        shape = [1] * x.dim()
        shape[dim] = x.shape[dim]
        offsets = offsets + torch.arange(x.shape[dim]).view(shape) * stride
    return {x.data_ptr() + x.itemsize * offset for offset in offsets.flatten().tolist()}


def _hidden(mask: Mask, rows: int, columns: int) -> Tensor:
    i, j = torch.arange(rows)[:, None] + mask.offset, torch.arange(columns)[None]
    if mask.kind == "full":
        return torch.zeros(rows, columns, dtype=torch.bool)
    return (j > i) | (j <= i - mask.window if mask.kind == "window" else torch.tensor(False))


def _scores(q: Tensor, k: Tensor, mask: Mask, scale: float, wide: torch.dtype) -> Tensor:
    """[b, h, n, m]."""
    group = q.shape[2] // k.shape[2]
    k = k.to(wide).repeat_interleave(group, 2)
    scores = torch.einsum("nbhd,mbhd->bhnm", q.to(wide), k) * scale
    return scores.masked_fill(_hidden(mask, len(q), len(k)), -math.inf)


def _forward(run: list[ForwardTask], scale: float) -> None:
    first, wide = run[0], run[0].lse.dtype
    scores = [_scores(task.q, task.k, task.mask, scale, wide) for task in run]
    group = first.q.shape[2] // first.k.shape[2]
    values = [task.v.to(wide).repeat_interleave(group, 2) for task in run]
    if first.accumulate:
        scores.append(first.lse.unsqueeze(-1))
    scores = torch.cat(scores, -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
    num_keys = sum(len(x) for x in values)
    out = torch.einsum("bhnm,mbhd->nbhd", weights[..., :num_keys], torch.cat(values))
    if first.accumulate:
        old = torch.where((first.lse == -math.inf)[..., None], 0, first.out_acc.permute(1, 2, 0, 3))
        out += (weights[..., num_keys:] * old).permute(2, 0, 1, 3)
    first.lse.copy_(lse)
    if first.out is None:
        first.out_acc.copy_(out)
    else:
        first.out.copy_(out)
        if first.out_acc is not None:
            first.out_acc.fill_(math.nan)


def _backward(task: BackwardTask, scale: float) -> None:
    wide, group = task.lse.dtype, task.q.shape[2] // task.k.shape[2]
    scores = _scores(task.q, task.k, task.mask, scale, wide)
    safe = task.lse.masked_fill(task.lse == -math.inf, math.inf)
    weights = (scores - safe.unsqueeze(-1)).exp()
    dout, q = task.dout.to(wide), task.q.to(wide)
    k, v = (x.to(wide).repeat_interleave(group, 2) for x in (task.k, task.v))
    dscores = torch.einsum("nbhd,mbhd->bhnm", dout, v) - task.delta.unsqueeze(-1)
    dscores = weights * dscores * scale
    task.dq.add_(torch.einsum("bhnm,mbhd->nbhd", dscores, k))
    for total, part in (
        (task.dk, torch.einsum("bhnm,nbhd->mbhd", dscores, q)),
        (task.dv, torch.einsum("bhnm,nbhd->mbhd", weights, dout)),
    ):
        total.add_(part.unflatten(2, (-1, group)).sum(3))
