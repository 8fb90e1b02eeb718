"""Configs: their forms, the typed schema, and messages for mistakes."""

from memtrain.config.schema import ActivationRule, Activations, Config, Optim, Release, StateRule
from memtrain.config.sources import compose, from_mapping, load, options

__all__ = [
    "ActivationRule",
    "Activations",
    "Config",
    "Optim",
    "Release",
    "StateRule",
    "compose",
    "from_mapping",
    "load",
    "options",
]
