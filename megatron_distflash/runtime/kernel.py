"""What a block kernel is: attention over one rectangle of queries × keys.

Tensor shapes here and in the executors (n, m: tokens of the block; h: query heads; g: KV heads):
    q, out, dout, dq  [n, b, h, d]
    k, v, dk, dv      [m, b, g, d]
    lse, delta        [n, b, h], natural logarithm, in the state's dtype (float64 for float64, else
    float32); in memory tokens are innermost, [b, h, n], as kernels read them fastest

A kernel's backward gets the LSE over *all* keys of the sequence, not the block's own; so the
blocks' gradients simply add up to the whole gradient (FlashAttention, arXiv 2205.14135, algorithm
4, per block). Every kernel's LSE is the same number, so forward and backward may be of different
kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Direction = Literal["forward", "backward"]
SHAPES = ("full", "causal", "band")  # of blocks: what ``Band.shape`` may say


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
class State:
    """Where a forward block's result goes.

    Attributes:
        acc: running output in the state's dtype. Need not be initialised where nothing is
            accumulated yet, and the block that writes ``out`` may leave it as it was. None: the
            rows have this one block, and ``out`` is given.
        lse: running LSE; need not be initialised either.
        out: given to the last block of its rows: the merged output, in q's dtype.
        accumulate: whether acc and lse hold something to merge with.
    """

    acc: Tensor | None
    lse: Tensor
    out: Tensor | None = None
    accumulate: bool = False

    @property
    def result(self) -> Tensor | None:
        """Where the output is once the block is computed."""
        return self.acc if self.out is None else self.out


@dataclass(frozen=True, slots=True)
class ForwardBlock:
    """One block of a forward. ``into`` None: the kernel makes the results' tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    into: State | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """What the backward knows of a block's rows, over all keys of the sequence.

    Attributes:
        out: None on a helper, which gets delta instead.
    """

    lse: Tensor
    delta: Tensor
    out: Tensor | None = None


Sums = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class BackwardBlock:
    """One block of a backward.

    ``into``: sums of dq, dk and dv in the state's dtype, each to be added to in place; None: the
    kernel makes a fresh tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    rows: Rows
    band: Band
    into: Sums = (None, None, None)


class BlockKernel(Protocol):
    """A way to compute blocks."""

    name: str

    def refusal(self, q: Tensor, shape: str, direction: Direction) -> str | None:
        """Why it cannot compute such a block (one clause), or None."""

    def forward(
        self, blocks: Sequence[ForwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute blocks in turn, in one launch where the kernel can.

        Blocks on the same rows stand next to each other and have the same ``acc`` and ``lse``; any
        other two have no row in common. ``gives_way``: kernels that move data may come meanwhile; a
        kernel that stays on its multiprocessors should leave them some.

        Returns:
            (out, lse) of each block: out normalised, in q's dtype or the state's. Of blocks with
            ``into``, its tensors.
        """

    def backward(
        self, blocks: Sequence[BackwardBlock], scale: float, gives_way: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Compute blocks in turn, in one launch where the kernel can; they may share sums.
        ``gives_way`` as above.

        Returns:
            (dq, dk, dv) of each block: the sums it was given, or fresh tensors in q's dtype or the
            state's.
        """
