"""Attention cases: their inputs, what plain attention makes of them, and one rank's part.

A ``Case`` travels to the ranks instead of tensors: everyone makes the same global inputs from its
seed. Global tensors have their tokens in sequence order; shapes as in ``runtime.blocks``, with N
tokens of the whole sequence:
    q, out, dout, dq  [N, b, h, d]
    k, v, dk, dv      [N, b, g, d]
    lse               [N, b, h]
"""

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distflash.plan import Mask
from megatron_distflash.runtime.attention import dist_flash_attention
from tests.plan.cases import attends
from tests.workers import Seat, WorkerPool

TIMEOUT_S = 60


@dataclass(frozen=True)
class Case:
    """One attention problem, and how it is split over ``len(lengths)`` ranks.

    ``values``: how the inputs are distributed. ``normal``: standard normal; ``peaked``: few keys
    take most of each row's weight; ``shifted``: values and output gradients have a mean, so that
    the backward cancels.
    """

    seed: int
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    schedule: str = "balanced"
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    scale: float | None = None
    batch: int = 1
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    values: str = field(default="normal", kw_only=True)

    @property
    def num_ranks(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def options(self) -> dict:
        """The keyword arguments that say all this to ``dist_flash_attention``."""
        return {
            "causal": self.causal,
            "window": self.window,
            "documents": self.documents,
            "softmax_scale": self.scale,
            "schedule": self.schedule,
            "chunk_lengths": self.lengths,
        }

    @property
    def mask(self) -> Mask:
        left = None if self.window is None else self.window - 1
        return Mask(left, 0 if self.causal else None, self.documents)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, dout of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        query_heads, kv_heads = self.heads

        def random(num_heads: int) -> Tensor:
            shape = (self.num_tokens, self.batch, num_heads, self.head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q, k, v, dout = (random(h) for h in (query_heads, kv_heads, kv_heads, query_heads))
        if self.values == "peaked":
            q = q * 4
        if self.values == "shifted":
            v, dout = v + 2, dout + 1
        return tuple(x.to(self.dtype) for x in (q, k, v, dout))

    def tokens_of(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of ``rank`` are."""
        if self.schedule != "zigzag":
            start = sum(self.lengths[:rank])
            return torch.arange(start, start + self.lengths[rank])
        first_half = [length // 2 for length in self.lengths]
        second_half = [length - length // 2 for length in self.lengths]
        start = sum(first_half[:rank])
        stop = self.num_tokens - sum(second_half[:rank])
        first = torch.arange(start, start + first_half[rank])
        return torch.cat([first, torch.arange(stop - second_half[rank], stop)])


# ---- plain attention ----------------------------------------------------------------------------

NAMES = ("out", "lse", "dq", "dk", "dv")


def plain(case: Case, dout: Tensor | None = None) -> dict[str, Tensor]:
    """What ``NAMES`` must be, from the same (rounded) inputs, in float64."""
    q, k, v, case_dout = (x.double() for x in case.inputs())
    dout = case_dout if dout is None else dout
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = plain_attention(q, k, v, case)
    out.backward(dout)
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        "dq": q.grad,
        "dk": k.grad,
        "dv": v.grad,
    }


def plain_attention(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """(out, lse), one matrix of scores per head."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if case.scale is None else case.scale
    scores = torch.einsum("nbhd,mbhd->bhnm", q, k) * scale
    hidden = ~torch.from_numpy(attends(case.mask, case.num_tokens))
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("bhnm,mbhd->nbhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).permute(2, 0, 1)


# ---- the ranks ----------------------------------------------------------------------------------


_groups: list[dist.ProcessGroup] = []  # Of a worker: the first 1, 2, … workers.


def connect(seat: Seat) -> None:
    """Once in every worker: the groups, which live as long as it does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{seat.directory / 'store'}",
        rank=seat.rank,
        world_size=seat.world,
        timeout=timeout,
    )
    _groups[:] = [dist.new_group(range(size), timeout=timeout) for size in range(1, seat.world + 1)]


@contextlib.contextmanager
def around(seat: Seat):
    """A case's first arguments: (rank, group)."""
    yield seat.rank, _groups[seat.world - 1]


def attend_on_rank(rank: int, group: dist.ProcessGroup | None, case: Case) -> dict[str, Tensor]:
    """``NAMES`` of the rank's own tokens, by ``dist_flash_attention``."""
    q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dist_flash_attention(*leaves, group=group, return_lse=True, **case.options)
    out.backward(dout)
    return dict(zip(NAMES, (out.detach(), lse, *(x.grad for x in leaves)), strict=True))


# ---- in the test --------------------------------------------------------------------------------


def gather(case: Case, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' results in sequence order."""
    order = torch.cat([case.tokens_of(rank) for rank in range(case.num_ranks)]).argsort()
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def attend(ranks: WorkerPool, case: Case) -> dict[str, Tensor]:
    """``NAMES`` of the whole sequence, computed by the case's ranks."""
    return gather(case, ranks.run(attend_on_rank, case, world=case.num_ranks, timeout_s=120))


def check(
    case: Case,
    found: dict[str, Tensor],
    tolerance: float = 1e-11,
    expected: dict[str, Tensor] | None = None,
) -> None:
    """Compare ``found`` with ``plain``: no element is further off than ``tolerance``."""
    expected = plain(case) if expected is None else expected
    for name, value in found.items():
        assert value.shape == expected[name].shape, (name, case)
        error = (value.double() - expected[name]).abs().max().item()
        assert error <= tolerance, f"{name} is off by {error:.3g} in {case}"
