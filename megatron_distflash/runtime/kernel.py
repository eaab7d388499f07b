"""What a block kernel is: attention over one rectangle of queries × keys.

Tensor shapes here and in the executors (n, m: tokens of the block; h: query heads; g: KV heads):
    q, out, dout, dq  [n, b, h, d]
    k, v, dk, dv      [m, b, g, d]
    lse, delta        [n, b, h], natural logarithm, in the state's dtype (float64 for float64, else
    float32)

A kernel's backward gets the LSE over *all* keys of the sequence, not the block's own; so the
blocks' gradients simply add up to the whole gradient (FlashAttention, arXiv 2205.14135, algorithm
4, per block).
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Band:
    """Row i of a block sees column j when ``i - left <= j <= i + right``; None is no bound."""

    left: int | None = None
    right: int | None = None

    def shape(self, rows: int, columns: int) -> str:
        """``full``, ``causal`` (square, on the diagonal) or ``band``."""
        if self.left is None and self.right is None:
            return "full"
        return "causal" if self.left is None and self.right == 0 and rows == columns else "band"


@dataclass(frozen=True, slots=True)
class Rows:
    """What the backward knows of a block's rows, over all keys of the sequence.

    Attributes:
        out: None on a helper, which gets delta instead.
    """

    lse: Tensor
    delta: Tensor
    out: Tensor | None = None


class BlockKernel(Protocol):
    """A way to compute one block."""

    name: str

    def refusal(self, q: Tensor, shape: str) -> str | None:
        """Why it cannot compute such a block (one clause), or None."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        band: Band,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the block, out normalised.

        Args:
            into: a state (out, lse) of the same rows in the state's dtype, to be updated in place
                with the block and returned; None: fresh tensors, out in q's dtype or the state's.
        """

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Rows,
        scale: float,
        band: Band,
        into: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of the block.

        Args:
            into: sums in the state's dtype, each to be added to in place and returned; None: a
                fresh tensor, in q's dtype or the state's.
        """
