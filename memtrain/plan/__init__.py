"""The plan: rules applied to sites, before training."""

from memtrain.plan.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
