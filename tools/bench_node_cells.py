"""What tools/bench_node.py attention measures: cells (shapes) and columns (ways to compute them).

No torch here: the launcher and the report need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

PASSES = ("forward", "both")  # both: forward and backward
BACKWARD_FACTOR = 2.5  # Five matrix products against two.
SCHEDULES = ("balanced", "paper", "ring", "zigzag", "auto")
STOCK = ("p2p", "all_gather", "a2a")
WRONG = "wrong"  # The status of a column that computes something else.
NOTHING = "none"  # In place of a comm: nothing is moved. Of a kernel: nothing is computed.


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape, causal.

    Attributes:
        tokens: per rank.
    """

    num_ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        tokens = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"P = {self.num_ranks}, {tokens}, {self.heads}/{self.kv_heads}"

    @property
    def key(self) -> str:
        """For file names."""
        return f"p{self.num_ranks}-{self.tokens}-{self.heads}-{self.kv_heads}-{self.head_dim}"

    def flops_per_rank(self, of: str) -> float:
        """Of one pass; pairs below the diagonal only."""
        whole = self.tokens * self.num_ranks
        forward = 4 * self.head_dim * self.heads * whole * whole / 2
        return forward * (1 + BACKWARD_FACTOR if of == "both" else 1) / self.num_ranks

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Column:
    """One way to compute a cell.

    Attributes:
        family: ``ours``, ``te`` (Transformer Engine's context parallelism) or ``alone`` (the whole
            sequence on the whole GPU by one process).
        schedule: of ours; of ``te`` its cp_comm_type.
        comm: of ours; ``none``: tasks get fresh random buffers, nothing moves.
        kernel: of ours and ``alone``; ``none``: the transfers with nothing to compute.
    """

    family: str
    schedule: str = ""
    comm: str = ""
    kernel: str = ""

    @property
    def name(self) -> str:
        parts = (self.schedule, self.comm, self.kernel)
        first = () if self.family == "ours" else (self.family,)
        return "/".join([*first, *filter(None, parts)])

    @staticmethod
    def parse(name: str) -> Column:
        """The inverse of ``name``; ValueError if there is no such column."""
        first, *rest = name.split("/")
        if first == "te" and len(rest) == 1 and rest[0] in STOCK:
            return Column("te", schedule=rest[0])
        if first == "alone" and len(rest) == 1:
            return Column("alone", kernel=rest[0])
        if first in SCHEDULES and len(rest) == 2:
            return Column("ours", first, *rest)
        raise ValueError(
            f"no column is called {name!r}: give SCHEDULE/COMM/KERNEL, te/TYPE or alone/KERNEL"
        )

    @property
    def bound(self) -> Column:
        """The column that bounds this one. Transformer Engine's blocks are cuDNN's."""
        return Column("alone", kernel="cudnn" if self.family == "te" else self.kernel)

    @property
    def is_real(self) -> bool:
        """Whether it computes the attention, so that results can be checked."""
        return NOTHING not in (self.comm, self.kernel)

    @property
    def layout(self) -> str:
        zigzag = self.family == "te" or self.schedule == "zigzag"
        return "zigzag" if zigzag else "contiguous"


def cells(
    ranks: Sequence[int],
    tokens: Sequence[int],
    heads: Sequence[tuple[int, int]],
    head_dim: int = 128,
) -> list[Cell]:
    """All shapes, the most important first: each list is given in the order of importance."""
    return [
        Cell(num_ranks, n, *pair, head_dim) for pair in heads for n in tokens for num_ranks in ranks
    ]


def columns(
    schedules: Sequence[str], comms: Sequence[str], kernels: Sequence[str], stock: Sequence[str]
) -> list[list[Column]]:
    """Columns in groups, the most important first; the columns of a group take turns.

    The first schedule goes with everything, each further one has a group of its own; what bounds
    the columns is in the first group.
    """
    groups = []
    for idx, schedule in enumerate(schedules):
        group = [] if idx else [Column("te", schedule=kind) for kind in stock]
        for kernel in kernels:
            group += [] if idx else [Column("alone", kernel=kernel)]
            group.append(Column("ours", schedule, NOTHING, kernel))
            group += [Column("ours", schedule, comm, kernel) for comm in comms]
        group += [Column("ours", schedule, comm, NOTHING) for comm in comms if not idx]
        groups.append(group)
    if stock and not any(column.kernel == "cudnn" for column in groups[0]):
        groups[0].append(Column("alone", kernel="cudnn"))
    return groups
