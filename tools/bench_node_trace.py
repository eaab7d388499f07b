"""Traces of several ranks as one Chrome trace: rank by rank, on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METADATA = "distflash"
_PIDS_PER_RANK = 100_000_000


def merge_traces(paths: Sequence[Path], target: Path, about: dict[str, Any]) -> None:
    """Write the ranks' traces (of one machine, so of one clock) as one and delete the parts.

    The metadata of the result holds ``about`` and what each rank noted of itself.
    """
    events: list[dict[str, Any]] = []
    noted: list[dict[str, Any]] = []
    base_ns = None
    for rank, path in enumerate(paths):
        trace = json.loads(path.read_text())
        own_base_ns = trace.get("baseTimeNanoseconds", 0)
        base_ns = own_base_ns if base_ns is None else base_ns
        shift_us = (own_base_ns - base_ns) / 1e3
        noted.append(trace.get(METADATA, {}))
        events += [_of_rank(event, rank, shift_us) for event in trace["traceEvents"]]
        path.unlink()
    merged = {
        METADATA: about | {"ranks": noted},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceEvents": events,
    }
    target.write_text(json.dumps(merged))


def rank_of(event: dict[str, Any]) -> int | None:
    """Which rank's event of a merged trace it is; None: of no process by number."""
    pid = event.get("pid")
    return pid // _PIDS_PER_RANK if isinstance(pid, int) else None


def _of_rank(event: dict[str, Any], rank: int, shift_us: float) -> dict[str, Any]:
    """The event with the rank in its process, and in the ids by which events find each other."""
    event = dict(event)
    if "ts" in event:
        event["ts"] += shift_us
    if "pid" in event:
        pid = event["pid"]
        own = isinstance(pid, int)
        event["pid"] = rank * _PIDS_PER_RANK + pid if own else f"rank {rank} {pid}"
    if "id" in event:
        event["id"] = f"{rank}.{event['id']}"
    if event.get("ph") == "M" and event.get("name") == "process_name":
        event["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
    return event
