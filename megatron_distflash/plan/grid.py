"""A plan as a table of text: rows are ranks, columns steps, ``q5·k0*`` a task helped with."""

from megatron_distflash.plan.plan import Layout, Plan, PlanError, Step, Task
from megatron_distflash.plan.spans import Span


def format_grid(
    plan: Plan, *, mark: tuple[int | None, int | None] = (None, None), only_rank: int | None = None
) -> str:
    """The plan's table.

    Args:
        mark: (rank, step) of a cell to point at with ``>``.
        only_rank: print this rank's row alone.
    """
    header = ["rank", *(f"step {idx}" for idx in range(plan.num_steps))]
    rows = [header]
    for rank, steps in enumerate(plan.steps):
        if only_rank is None or rank == only_rank:
            cells = [format_step(plan, rank, step) for step in steps]
            cells = [f"> {cell}" if (rank, idx) == mark else cell for idx, cell in enumerate(cells)]
            rows.append([str(rank), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def format_step(plan: Plan, rank: int, step: Step) -> str:
    """One cell: the tasks; ``+`` for merges alone, ``~`` for transfers alone, ``.`` for nothing."""
    if step.tasks:
        return " ".join(format_task(plan, rank, task) for task in step.tasks)
    if step.merges:
        return "+"
    return "~" if step.sends or step.receives else "."


def format_task(plan: Plan, rank: int, task: Task) -> str:
    """``q5·k0``: queries of chunk 5 × keys of chunk 0; ``[…]`` part of the heads, ``(…)`` rows."""
    heads = "" if task.heads == Span(0, plan.num_kv_heads) else f"[h{task.heads}]"
    try:
        star = "*" if plan.is_helped(rank, task) else ""
        return f"q{_part(plan.layout, task.queries)}·k{_part(plan.layout, task.keys)}{heads}{star}"
    except PlanError:  # broken plans are shown too: tokens that no one chunk holds have no name
        return f"q[{task.queries}]·k[{task.keys}]{heads}"


def _part(layout: Layout, tokens: Span) -> str:
    chunk = layout.chunk_at(tokens)
    name = str(layout.chunks.index(chunk))
    if tokens == chunk.tokens:
        return name
    start = chunk.tokens.start
    return f"{name}({tokens.start - start}:{tokens.stop - start})"
