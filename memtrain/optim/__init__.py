"""Compressed states for any torch optimizer, and the fused ones."""

from memtrain.optim.adamw4bit import (
    Adam4bit,
    Adam8bit,
    AdamW4bit,
    AdamW4bitFactor,
    AdamW8bit,
    AdamW8bitFactor,
)
from memtrain.optim.base import CompressedStates
from memtrain.optim.compressed import CompressedOptimizer
from memtrain.optim.convert import compress, restore
from memtrain.optim.fused import FusedStates
from memtrain.optim.layout import Choice, StateRow
from memtrain.optim.lion import Lion, Lion4bit, Lion8bit
from memtrain.optim.portable import portable_state_dict
from memtrain.optim.release import ReleaseGradients
from memtrain.optim.report import describe, predict, state_bytes
from memtrain.optim.sgd import SGD4bit, SGD8bit
from memtrain.optim.weights import SplitWeights

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamW4bit",
    "AdamW4bitFactor",
    "AdamW8bit",
    "AdamW8bitFactor",
    "Choice",
    "CompressedOptimizer",
    "CompressedStates",
    "FusedStates",
    "Lion",
    "Lion4bit",
    "Lion8bit",
    "ReleaseGradients",
    "SGD4bit",
    "SGD8bit",
    "SplitWeights",
    "StateRow",
    "compress",
    "describe",
    "portable_state_dict",
    "predict",
    "restore",
    "state_bytes",
]
