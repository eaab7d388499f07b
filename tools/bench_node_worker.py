"""One rank of tools/bench_node.py attention; ``bench_ranks`` starts it and asks it.

Requests (``do``): ``open`` a cell, ``check`` a column, ``time`` it, ``trace`` it, ``close``.
With WORLD_SIZE 1 the process is nobody's rank: it has the whole sequence, for the bound.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import time
import traceback
from datetime import timedelta
from typing import Any

import bench_ranks

HANG_S = 120
START_AFTER_S = 0.003


class Worker:
    """Answers requests; what goes wrong with a column is its answer."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._on_gpu = torch.cuda.is_available()
        self._device = torch.device("cpu")
        if self._on_gpu:
            self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self._device)
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._group = self._meeting = None
        if self._num_ranks > 1:
            backend = "nccl" if self._on_gpu else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=HANG_S))
            self._group = dist.group.WORLD
            self._meeting = dist.new_group(backend="gloo")
        self._problem: Any = None
        self._runners: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        import torch

        work = getattr(self, request.pop("do"))
        try:
            return {"status": "ok"} | work(**request)
        except (RuntimeError, ValueError, AssertionError, torch.OutOfMemoryError) as error:
            traceback.print_exc()
            message = str(error).strip() or type(error).__name__
            return {"status": "failed", "message": message.splitlines()[0]}

    def open(self, cell: dict[str, int], seed: int) -> dict[str, Any]:
        from bench_node_cells import Cell
        from bench_node_problem import Problem

        place = (self._rank, self._group, self._device, self._dtype)
        self._problem = Problem(Cell(**cell), *place, seed)
        if not self._on_gpu:
            return {}
        import torch

        properties = torch.cuda.get_device_properties(self._device)
        return {"multiprocessors": properties.multi_processor_count}

    def check(self, column: str) -> dict[str, Any]:
        """Make the column and compare what it computes with torch's attention."""
        import torch
        from bench_node_cells import WRONG, Column
        from bench_node_columns import make_runner, recorded_plans, sent_bytes
        from bench_node_problem import TOLERANCES

        wanted = Column.parse(column)
        runner = make_runner(wanted, self._problem, self._group)
        found: dict[str, Any] = {}
        with recorded_plans() as recorded:
            results = runner.both()
        if wanted.is_real:
            errors = self._problem.errors(wanted.layout, results)
            limit = TOLERANCES[self._dtype]
            if not max(errors.values()) < limit:  # Nor is NaN.
                message = f"wrong: relative errors {errors}, at most {limit} expected"
                return {"status": WRONG, "message": message}
            found["errors"] = errors
        if recorded and self._group is not None:
            found["sent_bytes"] = [sent_bytes(p, k, self._rank) for p, k, _ in recorded]
        self._runners[column] = runner
        if self._on_gpu:
            found["allocated_bytes"] = torch.cuda.memory_allocated()
        return found

    def time(self, column: str, of: str, calls: int) -> dict[str, Any]:
        """Milliseconds per call, of calls one after the other as layers are."""
        call = getattr(self._runners[column], of)
        self._synchronize()
        self._meet()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        issued = time.perf_counter()
        self._synchronize()
        end = time.perf_counter()
        return {"ms": (end - begun) * 1e3 / calls, "issue_ms": (issued - begun) * 1e3 / calls}

    def trace(self, column: str, path: str) -> dict[str, Any]:
        """A Chrome trace of one forward and backward, with the plans as its metadata."""
        import torch
        from bench_node_columns import recorded_plans

        runner = self._runners[column]
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        runner.both()
        with torch.profiler.profile(activities=activities) as profiler, recorded_plans() as found:
            self._synchronize()
            self._meet()
            runner.both()
            self._synchronize()
            plans = [json.loads(plan.to_json()) for plan, _, _ in found]
            about = {"rank": self._rank, "column": column, "plans": plans}
            profiler.add_metadata_json("distflash", json.dumps(about))
        profiler.export_chrome_trace(path)
        return {"path": path}

    def drop_wanted(self) -> dict[str, Any]:
        """No check follows: give the reference's memory back before something is timed."""
        self._problem.drop_wanted()
        self._collect()
        return {}

    def close(self) -> dict[str, Any]:
        """Forget the cell and what moved its transfers."""
        from megatron_distflash.runtime import comm

        self._runners.clear()
        self._problem = None
        if self._group is not None:
            comm.close(self._group)
        self._collect()
        return {}

    def _collect(self) -> None:
        import torch

        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()

    def _meet(self) -> None:
        """Begin together."""
        import torch
        import torch.distributed as dist

        if self._meeting is None:
            return
        # Leaving a barrier takes some ranks a millisecond longer than others: they agree on a time,
        # by the machine's clock.
        start = torch.tensor(time.perf_counter() + START_AFTER_S, dtype=torch.float64)
        dist.all_reduce(start, dist.ReduceOp.MAX, group=self._meeting)
        while time.perf_counter() < start.item():
            pass


def prepare() -> Any:
    """Import all that takes long, and wait with the GPU until the first request."""
    import bench_node_columns  # noqa: F401
    import torch

    on_node = torch.cuda.is_available() and int(os.environ["WORLD_SIZE"]) > 1
    if on_node and importlib.util.find_spec("transformer_engine") is not None:
        import transformer_engine.pytorch  # noqa: F401
    worker: list[Worker] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if not worker:
            worker.append(Worker())
        return worker[0].answer(request)

    return answer


if __name__ == "__main__":
    bench_ranks.serve(prepare)
