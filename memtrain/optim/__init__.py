"""Compressed states for any torch optimizer, and the fused ones."""

from memtrain.optim.adamw4bit import AdamW4bit
from memtrain.optim.base import CompressedStates
from memtrain.optim.compressed import CompressedOptimizer
from memtrain.optim.convert import compress, restore
from memtrain.optim.layout import Choice, StateRow
from memtrain.optim.report import describe, predict, state_bytes

__all__ = [
    "AdamW4bit",
    "Choice",
    "CompressedOptimizer",
    "CompressedStates",
    "StateRow",
    "compress",
    "describe",
    "predict",
    "restore",
    "state_bytes",
]
