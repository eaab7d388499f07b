"""Timing on a GPU: columns that take turns, so that clocks drift for all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]


def time_columns(columns: Mapping[str, Run], turns: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds a run, one number a turn; a run that is not timed goes before each."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    for _ in range(turns):
        for name, run in columns.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return times
