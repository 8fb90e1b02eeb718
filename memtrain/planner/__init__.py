"""From a budget of bytes to a plan: what to compress, and what to recompute."""

from memtrain.planner.goal import ALLOWED, DoesNotFit, Fit, Goal
from memtrain.planner.search import fit, make_plan

__all__ = ["ALLOWED", "DoesNotFit", "Fit", "Goal", "fit", "make_plan"]
