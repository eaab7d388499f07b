"""The tensors of one cell on one rank, and what attention over them should give.

Shapes: N whole sequence, n tokens of one rank, h query heads, g KV heads, d head dim; batch 1.
    q, out, dout, dq [n, 1, h, d]; k, v, dk, dv [n, 1, g, d]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from bench_node_cells import Cell
from torch import Tensor

NAMES = ("out", "dq", "dk", "dv")
# Relative error against one kernel over the whole sequence, which itself rounds: bf16 has 8 bits.
TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-5}


class Problem:
    """Inputs in both layouts, drawn alike by whoever draws them.

    The sequence is 2P pieces, each with a seed of its own: a rank of the contiguous layout holds
    two neighbours, a rank of the zigzag layout the pieces r and 2P - 1 - r.

    Args:
        group: None: the cell is one of one rank.
    """

    def __init__(
        self,
        cell: Cell,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        if cell.tokens % 2:
            raise ValueError(f"a rank's tokens are two pieces: {cell.tokens} is odd")
        self.cell, self.rank, self._group = cell, rank, group
        self._device, self._dtype, self._seed = device, dtype, seed
        self._inputs: dict[str, list[Tensor]] = {}
        self._wanted: dict[str, list[Tensor]] = {}
        self._shared: dict[tuple, Any] = {}

    def inputs(self, layout: str) -> list[Tensor]:
        """q, k, v, dout of this rank; q, k, v are leaves that need gradients."""
        if layout not in self._inputs:
            pieces = [self._draw(piece) for piece in self._pieces(layout)]
            whole = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
            self._inputs[layout] = [x.requires_grad_(i < 3) for i, x in enumerate(whole)]
        return self._inputs[layout]

    def errors(self, layout: str, results: list[Tensor]) -> dict[str, float]:
        """Relative errors of this rank's out, dq, dk, dv."""
        if not self._wanted:
            self._compute_wanted()
        errors = {}
        for name, found, wanted in zip(NAMES, results, self._wanted[layout], strict=True):
            difference = found.reshape(wanted.shape).float() - wanted.float()
            errors[name] = (difference.norm() / wanted.float().norm()).item()
        return errors

    def shared(self, make: Callable[..., Any], *args: Any) -> Any:
        """What several columns use together, made once: ``make(*args)``."""
        key = (make, args)
        if key not in self._shared:
            self._shared[key] = make(*args)
        return self._shared[key]

    def drop_wanted(self) -> None:
        """Nothing will be checked any more."""
        self._wanted.clear()

    # -- drawing --------------------------------------------------------------------------------

    def _pieces(self, layout: str) -> tuple[int, int]:
        if layout == "zigzag":
            return self.rank, 2 * self.cell.num_ranks - 1 - self.rank
        return 2 * self.rank, 2 * self.rank + 1

    def _draw(self, piece: int) -> list[Tensor]:
        """q, k, v, dout of one piece, all heads."""
        generator = torch.Generator(self._device).manual_seed(self._seed * 1000 + piece)
        cell = self.cell
        return [
            torch.randn(
                (cell.tokens // 2, 1, heads, cell.head_dim),
                generator=generator,
                device=self._device,
                dtype=torch.float32,
            ).to(self._dtype)
            for heads in (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
        ]

    # -- what is right --------------------------------------------------------------------------

    def _compute_wanted(self) -> None:
        """Every rank computes the whole sequence for a part of the heads, and all share results."""
        parts: dict[str, list[list[Tensor]]] = {"contiguous": [], "zigzag": []}
        for owner, heads in self._head_parts():
            whole = self._whole_results(heads) if owner == self.rank else self._empty(heads)
            if self._group is not None:
                for x in whole:
                    dist.broadcast(x, group_src=owner, group=self._group)
            for layout, found in parts.items():
                found.append([self._own_rows(x, layout) for x in whole])
        self._wanted = {
            layout: [torch.cat(x, dim=2) for x in zip(*found, strict=True)]
            for layout, found in parts.items()
        }

    def _head_parts(self) -> Iterator[tuple[int, range]]:
        """(rank, its KV heads); a rank without heads is left out."""
        num_ranks, heads = self.cell.num_ranks, self.cell.kv_heads
        for rank in range(num_ranks):
            part = range(heads * rank // num_ranks, heads * (rank + 1) // num_ranks)
            if part:
                yield rank, part

    def _whole_results(self, heads: range) -> list[Tensor]:
        """out, dq, dk, dv [N, 1, heads of the part, d] by torch's attention.

        On a GPU by its FlashAttention 2, which is no kernel that is measured by default.
        """
        ratio = self.cell.heads // self.cell.kv_heads
        rows = slice(heads.start * ratio, heads.stop * ratio), slice(heads.start, heads.stop)
        pieces = [
            [x[:, :, rows[i in (1, 2)]].contiguous() for i, x in enumerate(self._draw(piece))]
            for piece in range(2 * self.cell.num_ranks)
        ]
        q, k, v, dout = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = torch_attention(*leaves, "flash" if q.is_cuda else None)
        grads = torch.autograd.grad(out, leaves, dout)
        return [x.detach().contiguous() for x in (out, *grads)]

    def _empty(self, heads: range) -> list[Tensor]:
        cell = self.cell
        rows, ratio = cell.num_ranks * cell.tokens, cell.heads // cell.kv_heads
        sizes = [len(heads) * ratio] * 2 + [len(heads)] * 2
        return [
            torch.empty((rows, 1, size, cell.head_dim), dtype=self._dtype, device=self._device)
            for size in sizes
        ]

    def _own_rows(self, x: Tensor, layout: str) -> Tensor:
        half = self.cell.tokens // 2
        return torch.cat([x[p * half : (p + 1) * half] for p in self._pieces(layout)])


def torch_attention(q: Tensor, k: Tensor, v: Tensor, backend: str | None) -> Tensor:
    """Causal attention [n, b, h, d] of one process by one of torch's kernels; None: any."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    with sdpa_kernel(backends[backend]) if backend else contextlib.nullcontext():
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
            is_causal=True,
            enable_gqa=k.shape[2] != q.shape[2],
        )
    return out.permute(2, 0, 1, 3)
