"""One rank's whole plan on one GPU, with nothing moved, against one attention over everything.

What a rank computes under a plan, forward and backward with all tasks and merges, next to its share
(one part in P) of the same attention by one GPU. The quotient is the efficiency that is left when
communication is hidden entirely and no rank waits for another one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_unmoved import Unmoved
from torch import Tensor

from megatron_distflash.plan import Mask, build, build_backward
from megatron_distflash.runtime import reference

ROW_VALUE = 12.0  # about the LSE over 64k tokens of normal inputs; keeps probabilities small


@dataclass(frozen=True, slots=True)
class Replay:
    """Causal attention of ``num_ranks`` chunks of ``tokens`` tokens."""

    num_ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    schedule: str
    kernel: str

    def time(self, num_ranks: int, tokens: int, rank: int, turns: int) -> tuple[float, float]:
        """Median milliseconds of (forward, backward) of one rank of ``num_ranks``."""
        return tuple(_median_ms(run, turns) for run in self.passes(num_ranks, tokens, rank))

    def passes(
        self, num_ranks: int, tokens: int, rank: int
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """What computes the forward, and the backward, of one rank of ``num_ranks``."""
        forward, backward = self._plans(num_ranks, tokens)
        q, dout = (self._normal(tokens, self.heads) for _ in range(2))
        k, v = (self._normal(tokens, self.kv_heads) for _ in range(2))
        how = {
            "scale": self.head_dim**-0.5,
            "kernel": self.kernel,
            "transport": Unmoved(ROW_VALUE),
        }
        out, lse = reference.forward(forward, rank, q, k, v, **how)
        lse = torch.full_like(lse, ROW_VALUE) if num_ranks > 1 else lse
        return (
            lambda: reference.forward(forward, rank, q, k, v, **how),
            lambda: reference.backward(backward, rank, dout, q, k, v, out, lse, **how),
        )

    def _plans(self, num_ranks: int, tokens: int):
        lengths, heads = (tokens,) * num_ranks, {"num_heads": self.heads}
        heads["num_kv_heads"] = self.kv_heads
        causal = Mask(None, 0, ())
        builders = (build, build_backward)
        return [builder(self.schedule, lengths, **heads, mask=causal) for builder in builders]

    def _normal(self, tokens: int, heads: int) -> Tensor:
        shape = tokens, 1, heads, self.head_dim
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def report(self, turns: int) -> list[dict]:
        """Print every rank's times and efficiency; the same as data."""
        parts, rows = ("forward", "backward"), []
        alone = self.time(1, self.num_ranks * self.tokens, 0, turns)
        share = [ms / self.num_ranks for ms in alone]
        print(
            f"1/{self.num_ranks} of one GPU: forward {share[0]:.3f} ms, backward {share[1]:.3f} ms"
        )
        for rank in range(self.num_ranks):
            times = self.time(self.num_ranks, self.tokens, rank, turns)
            cells = [
                f"{part} {ms:.3f} ms ({bound / ms:.1%})"
                for part, ms, bound in zip(parts, times, share, strict=True)
            ]
            whole = sum(share) / sum(times)
            print(f"rank {rank}: {', '.join(cells)}, both {whole:.1%}", flush=True)
            rows.append({"rank": rank, "ms": times, "share_ms": share, "efficiency": whole})
        print(f"slowest rank: {min(row['efficiency'] for row in rows):.1%} of the bound")
        return rows


def _median_ms(run: Callable[[], object], turns: int) -> float:
    times = []
    run()
    for _ in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
