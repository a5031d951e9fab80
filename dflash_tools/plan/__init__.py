"""Lengths in, batches out: the order of a whole run, decided before step 0 (NumPy only)."""

from dflash_tools.config import PlanSettings
from dflash_tools.plan.planner import build_plan

__all__ = ["PlanSettings", "build_plan"]
