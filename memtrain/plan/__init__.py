"""Rules x sites -> plan: what is done to every site, decided before anything runs."""

from memtrain.plan.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
