"""From a budget of bytes to a plan: what to compress, and what to run again."""

from memtrain.planner.budget import fit
from memtrain.planner.fit import DoesNotFit, Fit
from memtrain.planner.goal import ALLOWED, Goal
from memtrain.planner.make import make_plan
from memtrain.planner.rates import Rates, measure_rates, read_rates, write_rates

__all__ = [
    "ALLOWED",
    "DoesNotFit",
    "Fit",
    "Goal",
    "Rates",
    "fit",
    "make_plan",
    "measure_rates",
    "read_rates",
    "write_rates",
]
