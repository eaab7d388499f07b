"""Plans: what every rank computes, sends, receives and merges. Standard library only."""

from megatron_distflash.plan.backward import backward
from megatron_distflash.plan.cost import PlanCost, cost
from megatron_distflash.plan.masks import Mask, MaskKind
from megatron_distflash.plan.plan import Direction, Payload, Plan, PlanError
from megatron_distflash.plan.schedules import SCHEDULES, build, build_backward
from megatron_distflash.plan.validate import validate

__all__ = [
    "SCHEDULES",
    "Direction",
    "Mask",
    "MaskKind",
    "Payload",
    "Plan",
    "PlanCost",
    "PlanError",
    "backward",
    "build",
    "build_backward",
    "cost",
    "validate",
]
