"""Draws plans as timelines: a row per rank, time in blocks of n × n from left to right; and what a
trace shows of a plan, in ms.

Every step lasts as long as its slowest rank computes. Beneath a rank's tasks lie thin bars: what it
receives during the step, which the next step may use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from plan_trace import MeasuredPlan

from megatron_distflash.plan import Direction, Payload, Plan, PlanCost
from megatron_distflash.plan.cost import step_work, task_work
from megatron_distflash.plan.grid import format_task
from megatron_distflash.plan.plan import Task, Transfer

OWN_DIAGONAL, OWN, HELPED = "#2f6690", "#8fc1e3", "#f4a259"
IDLE_FILL, IDLE_LINES = "#f4f4f4", "#c9c9c9"
QUERIES, KEYS, RESULTS = "#5b8e7d", "#8d7bb5", "#bc4b51"
OTHERS, MOVING = "#7a7a7a", "#b0903d"
INK, FAINT = "#222222", "#999999"
MEASURED_KINDS = [(OTHERS, "merges, copies"), (MOVING, "in flight")]

WIDTH_INCHES = 12.0
MARGIN_INCHES = 0.75  # left of the rows, for the ranks' names
HEADER_INCHES, FOOTER_INCHES, LEGEND_INCHES = 0.45, 0.45, 0.45
ROW_INCHES, MIN_ROW_INCHES, ROWS_INCHES = 0.42, 0.16, 10.0
DPI = 110

# Parts of a row's height of 1, from its top: tasks, then transfers, then nothing.
TASKS_TOP, TASKS_BOTTOM = 0.06, 0.66
TRANSFERS_TOP, TRANSFERS_BOTTOM = 0.70, 0.92
# Steps without tasks take no time in the cost model; they get this part of the axis to be seen.
TRANSFER_STEP_SHARE = 0.02

MAX_FONT, MIN_FONT = 8.0, 4.0
POINTS_PER_INCH, FONT_ASPECT = 72.0, 0.62  # a character is about 0.62 of its size wide


@dataclass(frozen=True, slots=True)
class _Canvas:
    axes: Axes
    plan: Plan
    inches_per_block: float
    row_inches: float

    def box(self, start: float, width: float, rank: int, top: float, bottom: float, **style):
        self.axes.add_patch(Rectangle((start, rank + top), width, bottom - top, **style))

    def label(self, text: str, start: float, width: float, middle: float, height: float, color):
        """Text in the middle of a box, left out where the box is too small to read it."""
        lines = text.split("\n")
        width_points = width * self.inches_per_block * POINTS_PER_INCH * 0.92
        height_points = height * self.row_inches * POINTS_PER_INCH * 0.9
        size = min(
            MAX_FONT,
            width_points / (FONT_ASPECT * max(map(len, lines))),
            height_points / (1.15 * len(lines)),
        )
        if size >= MIN_FONT:
            centre = {"ha": "center", "va": "center_baseline", "linespacing": 1.0}
            self.axes.text(start + width / 2, middle, text, fontsize=size, color=color, **centre)


def draw_timelines(plans: Sequence[tuple[Plan, PlanCost]], path: Path) -> None:
    """Draw the plans below each other on one time axis and write the picture to ``path``.

    Raises ValueError if the file's suffix is not one that matplotlib writes.
    """
    rows = sum(plan.num_ranks for plan, _ in plans)
    row_inches = max(MIN_ROW_INCHES, min(ROW_INCHES, ROWS_INCHES / rows))
    height = rows * row_inches + len(plans) * (HEADER_INCHES + FOOTER_INCHES) + LEGEND_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    length = max(_ends(plan)[-1] for plan, _ in plans)
    top = height
    for plan, figures in plans:
        bottom = top - HEADER_INCHES - plan.num_ranks * row_inches
        left, width = MARGIN_INCHES / WIDTH_INCHES, 1 - (MARGIN_INCHES + 0.25) / WIDTH_INCHES
        axes = figure.add_axes((left, bottom / height, width, plan.num_ranks * row_inches / height))
        inches_per_block = width * WIDTH_INCHES / length
        _draw(_Canvas(axes, plan, inches_per_block, row_inches), figures, length)
        top = bottom - FOOTER_INCHES
    _draw_legend(figure, plans[0][0].direction)
    figure.savefig(path, pil_kwargs={"optimize": True} if path.suffix == ".png" else None)


def draw_measured(measured: Sequence[MeasuredPlan], title: str, path: Path) -> None:
    """Draw each plan as it is meant and below it as it was measured, on one axis.

    The plan is drawn at the speed that a block had on average: what the measured one is longer by
    went into merges, copies and waiting. Raises ValueError as ``draw_timelines``.
    """
    rows = sum(2 * one.plan.num_ranks for one in measured)
    row_inches = max(MIN_ROW_INCHES, min(ROW_INCHES, ROWS_INCHES / rows))
    panel_inches = HEADER_INCHES + FOOTER_INCHES
    height = rows * row_inches + 2 * len(measured) * panel_inches + LEGEND_INCHES + 0.3
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    figure.suptitle(title, fontsize=10, color=INK)
    top = height - 0.3
    left, width = MARGIN_INCHES / WIDTH_INCHES, 1 - (MARGIN_INCHES + 0.25) / WIDTH_INCHES
    for one in measured:
        length_ms = max(one.length_ms, one.planned_ms)
        for draw, length in (
            (_draw_planned, length_ms / one.block_ms),
            (_draw_as_measured, length_ms),
        ):
            panel = one.plan.num_ranks * row_inches
            bottom = top - HEADER_INCHES - panel
            axes = figure.add_axes((left, bottom / height, width, panel / height))
            canvas = _Canvas(axes, one.plan, width * WIDTH_INCHES / length, row_inches)
            draw(canvas, one, length)
            top = bottom - FOOTER_INCHES
    _draw_legend(figure, measured[0].plan.direction, MEASURED_KINDS)
    figure.savefig(path, pil_kwargs={"optimize": True} if path.suffix == ".png" else None)


def _draw_planned(canvas: _Canvas, one: MeasuredPlan, length: float) -> None:
    ends = _ends(canvas.plan)
    for step_idx, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
        for rank in range(canvas.plan.num_ranks):
            _draw_tasks(canvas, rank, step_idx, start, end)
            _draw_receives(canvas, rank, step_idx, start, end)
    _dress(canvas, length)
    canvas.axes.set_title(
        _title(canvas.plan), loc="left", fontsize=13, fontweight="bold", color=INK
    )
    summary = f"as planned: {one.planned_ms:.2f} ms of blocks at {one.block_ms:.2f} ms each"
    canvas.axes.set_title(summary, loc="right", fontsize=9, color=INK)
    canvas.axes.set_xlabel("blocks (n queries × n keys)", fontsize=8, color=INK, labelpad=2)


def _draw_as_measured(canvas: _Canvas, one: MeasuredPlan, length: float) -> None:
    for rank, timeline in enumerate(one.ranks):
        style = {"facecolor": IDLE_FILL, "edgecolor": IDLE_LINES, "hatch": "////", "linewidth": 0}
        canvas.box(0, one.length_ms, rank, TASKS_TOP, TASKS_BOTTOM, **style)
        for spell in timeline.others:
            style = {"facecolor": OTHERS, "linewidth": 0}
            canvas.box(spell.start, spell.length, rank, TASKS_TOP, TASKS_BOTTOM, **style)
        for _, task, spell in timeline.tasks:
            _draw_task(canvas, rank, task, spell.start, spell.length)
        for spell in timeline.transfers:
            style = {"facecolor": MOVING, "alpha": 0.6, "linewidth": 0}
            canvas.box(spell.start, spell.length, rank, TRANSFERS_TOP, TRANSFERS_BOTTOM, **style)
    _dress(canvas, length)
    canvas.axes.set_title(f"measured: {one.length_ms:.2f} ms", loc="right", fontsize=9, color=INK)
    canvas.axes.set_xlabel("ms", fontsize=8, color=INK, labelpad=2)


def _ends(plan: Plan) -> list[float]:
    """Where each step ends on the time axis."""
    ranks = range(plan.num_ranks)
    slowest = [
        float(max(step_work(plan, rank, idx) for rank in ranks)) for idx in range(plan.num_steps)
    ]
    ends, end = [], 0.0
    for work in slowest:
        end += work or TRANSFER_STEP_SHARE * sum(slowest)
        ends.append(end)
    return ends


def _draw(canvas: _Canvas, figures: PlanCost, length: float) -> None:
    plan, axes = canvas.plan, canvas.axes
    ends = _ends(plan)
    for step_idx, (start, end) in enumerate(zip([0.0, *ends], ends, strict=False)):
        axes.axvline(end, color=FAINT, linewidth=0.5, linestyle=(0, (2, 3)), zorder=0)
        for rank in range(plan.num_ranks):
            _draw_tasks(canvas, rank, step_idx, start, end)
            _draw_receives(canvas, rank, step_idx, start, end)
    _dress(canvas, length)
    axes.set_title(_title(plan), loc="left", fontsize=13, fontweight="bold", color=INK)
    summary = (
        f"{figures.critical_path:.4g} blocks of compute, {figures.idle_fraction:.0%} idle, "
        f"{figures.volume_forward_mean:.4g} chunks sent per rank forward, "
        f"{figures.volume_backward_mean:.4g} backward"
    )
    axes.set_title(summary, loc="right", fontsize=9, color=INK)
    tail = "; then the last results come home" if figures.tail_steps else ""
    time = f"time in blocks (n queries × n keys){tail}"
    axes.set_xlabel(time, fontsize=8, color=INK, labelpad=2)


def _title(plan: Plan) -> str:
    is_backward = plan.direction is Direction.BACKWARD
    return f"{plan.schedule} {plan.direction}" if is_backward else plan.schedule


def _dress(canvas: _Canvas, length: float) -> None:
    """The axes around a timeline: ranks downwards, time to the right."""
    plan, axes = canvas.plan, canvas.axes
    axes.set_xlim(0, length)
    axes.set_ylim(plan.num_ranks, 0)
    axes.set_yticks([rank + (TASKS_TOP + TASKS_BOTTOM) / 2 for rank in range(plan.num_ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(plan.num_ranks)], fontsize=8, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_tasks(canvas: _Canvas, rank: int, step_idx: int, start: float, end: float) -> None:
    plan, now = canvas.plan, start
    for task in plan.steps[rank][step_idx].tasks:
        width = float(task_work(plan, task))
        _draw_task(canvas, rank, task, now, width)
        now += width
    computes = any(plan.steps[other][step_idx].tasks for other in range(plan.num_ranks))
    if computes and end - now > 1e-9:
        style = {"facecolor": IDLE_FILL, "edgecolor": IDLE_LINES, "hatch": "////", "linewidth": 0}
        canvas.box(now, end - now, rank, TASKS_TOP, TASKS_BOTTOM, **style)


def _draw_task(canvas: _Canvas, rank: int, task: Task, start: float, width: float) -> None:
    color = _task_color(canvas.plan, rank, task)
    canvas.box(start, width, rank, TASKS_TOP, TASKS_BOTTOM, facecolor=color, edgecolor="white")
    ink = "white" if color == OWN_DIAGONAL else INK
    middle, height = rank + (TASKS_TOP + TASKS_BOTTOM) / 2, TASKS_BOTTOM - TASKS_TOP
    canvas.label(_task_label(canvas.plan, rank, task), start, width, middle, height, ink)


def _task_color(plan: Plan, rank: int, task: Task) -> str:
    if plan.is_helped(rank, task):
        return HELPED
    same_chunk = plan.layout.chunk_at(task.queries) == plan.layout.chunk_at(task.keys)
    return OWN_DIAGONAL if same_chunk else OWN


def _task_label(plan: Plan, rank: int, task: Task) -> str:
    """As in the printed table, a part of the heads on a line of its own."""
    name, bracket, heads = format_task(plan, rank, task).partition("[")
    if not bracket:
        return name
    star = "*" if heads.endswith("*") else ""
    return f"{name}{star}\n{heads.rstrip('*').rstrip(']')}"


def _draw_receives(canvas: _Canvas, rank: int, step_idx: int, start: float, end: float) -> None:
    receives = canvas.plan.steps[rank][step_idx].receives
    middle, height = rank + (TRANSFERS_TOP + TRANSFERS_BOTTOM) / 2, TRANSFERS_BOTTOM - TRANSFERS_TOP
    for idx, transfer in enumerate(receives):
        width = (end - start) / len(receives)
        at = start + idx * width
        style = {"facecolor": _transfer_color(transfer), "edgecolor": "white", "linewidth": 0.8}
        canvas.box(at, width, rank, TRANSFERS_TOP, TRANSFERS_BOTTOM, **style)
        canvas.label(_transfer_label(canvas.plan, transfer), at, width, middle, height, "white")


def _transfer_color(transfer: Transfer) -> str:
    if transfer.payload.is_result:
        return RESULTS
    return KEYS if transfer.payload is Payload.KEY_VALUE else QUERIES


def _transfer_label(plan: Plan, transfer: Transfer) -> str:
    chunk = plan.layout.chunks.index(plan.layout.chunk_at(transfer.tokens))
    return f"{transfer.payload}{chunk} from {transfer.source}"


def _draw_legend(
    figure: Figure, direction: Direction, more: Sequence[tuple[str, str]] = ()
) -> None:
    back = direction is Direction.BACKWARD
    kinds = [
        (OWN_DIAGONAL, "own diagonal (half a block)"),
        (OWN, "own queries"),
        (HELPED, "done for another rank *"),
        (None, "idle"),
        (KEYS, "arrives: keys, values"),
        (QUERIES, "queries, output gradients" if back else "queries"),
        (RESULTS, "gradients" if back else "partial results"),
        *more,
    ]
    idle = {"facecolor": IDLE_FILL, "edgecolor": IDLE_LINES, "hatch": "////", "linewidth": 0}
    handles = [
        Patch(label=label, **({"facecolor": color} if color else idle)) for color, label in kinds
    ]
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        fontsize=8,
        frameon=False,
        columnspacing=1.4,
        handlelength=1.4,
        labelcolor=INK,
    )
