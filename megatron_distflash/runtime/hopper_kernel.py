"""Our own block kernels for Hopper (``kernels/``), which update states and sums themselves, and
take a step's blocks as one launch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from megatron_distflash.runtime import cuda_kernels
from megatron_distflash.runtime.cuda_kernels import CudaKernels
from megatron_distflash.runtime.cuda_tasks import HEAD_DIMS, BackwardTask, ForwardTask, Mask
from megatron_distflash.runtime.kernel import BackwardBlock, Band, Direction, ForwardBlock, State
from megatron_distflash.runtime.state import empty_rows, heads_first, zero_sums

# Tiles after which a block leaves its multiprocessor to whoever waits for one. Measured, see
# "Sharing the GPU" in kernels/NOTES.md; a tile of the backward takes longer.
TILES_PER_SHIFT: dict[Direction, int] = {"forward": 8, "backward": 4}


class Hopper:
    """Shapes and dtypes as in ``kernel``.

    Gradients are summed by atomic additions, in an order that changes from run to run;
    ``torch.use_deterministic_algorithms`` fixes it.
    """

    name = "cuda"

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
        if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bf16 and fp16 CUDA tensors only"
        if q.shape[-1] not in HEAD_DIMS:
            return f"it takes head dims {', '.join(map(str, HEAD_DIMS))}"
        kernels, reason = cuda_kernels.load()
        return reason if kernels is None else None

    def forward(
        self, blocks: Sequence[ForwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        states = [block.into or _fresh_state(block.q) for block in blocks]
        tasks = []
        for start, stop in _runs(states):
            run = states[start]
            if stop - start > 1:
                run = replace(states[stop - 1], accumulate=run.accumulate)
            tasks += [_forward_task(block, run) for block in blocks[start:stop]]
        _kernels().forward_accumulate(
            tasks, softmax_scale=scale, tiles_per_shift=_tiles_per_shift("forward", gives_way)
        )
        return [(state.result, state.lse) for state in states]

    def backward(
        self, blocks: Sequence[BackwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        grads = [_sums(block) for block in blocks]
        tasks = [_backward_task(block, sums) for block, sums in zip(blocks, grads, strict=True)]
        _kernels().backward_accumulate(
            tasks,
            softmax_scale=scale,
            tiles_per_shift=_tiles_per_shift("backward", gives_way),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grads


def _tiles_per_shift(direction: Direction, gives_way: bool) -> int:
    return TILES_PER_SHIFT[direction] if gives_way else 0


def _kernels() -> CudaKernels:
    kernels, reason = cuda_kernels.load()
    assert kernels is not None, reason
    return kernels


def _fresh_state(q: Tensor) -> State:
    """For a block that is alone on its rows: 16-bit output at once, no running one."""
    return State(None, empty_rows(q), q.new_empty(q.shape))


def _runs(states: list[State]) -> list[tuple[int, int]]:
    """Blocks next to each other on the same rows, as [start, stop): one pass over their state."""
    starts = [0]
    for idx in range(1, len(states)):
        if not _same_rows(states[idx - 1], states[idx]):
            starts.append(idx)
    return list(zip(starts, [*starts[1:], len(states)], strict=True))


def _same_rows(a: State, b: State) -> bool:
    return a.lse.data_ptr() == b.lse.data_ptr() and a.lse.shape == b.lse.shape


def _forward_task(block: ForwardBlock, run: State) -> ForwardTask:
    """``run``: how the state of the block's run begins (accumulate) and ends (out)."""
    lse, mask = heads_first(run.lse), mask_of(block.band)
    return ForwardTask(
        block.q, block.k, block.v, lse, run.acc, run.out, mask, accumulate=run.accumulate
    )


def _sums(block: BackwardBlock) -> tuple[Tensor, Tensor, Tensor]:
    pairs = zip((block.q, block.k, block.v), block.into, strict=True)
    dq, dk, dv = (zero_sums(x)[0] if total is None else total for x, total in pairs)
    return dq, dk, dv


def _backward_task(block: BackwardBlock, sums: tuple[Tensor, Tensor, Tensor]) -> BackwardTask:
    lse, delta = heads_first(block.rows.lse), heads_first(block.rows.delta)
    return BackwardTask(
        block.q, block.k, block.v, block.dout, lse, delta, *sums, mask_of(block.band)
    )


@lru_cache(maxsize=4096)
def mask_of(band: Band) -> Mask:
    """The band as the kernels name it."""
    if band.right is None:
        assert band.left is None, "a band that looks ahead without bound but not back"
        return Mask()
    if band.left is None:
        return Mask("causal", band.right)
    return Mask("window", band.right, band.left + band.right + 1)
