"""Compressed states for any torch optimizer, and the fused ones."""

from memtrain.optim.convert import compress, portable_state_dict, restore
from memtrain.optim.fused.adam import (
    Adam4bit,
    Adam8bit,
    AdamW4bit,
    AdamW4bitFactor,
    AdamW8bit,
    AdamW8bitFactor,
)
from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.fused.lion import Lion, Lion4bit, Lion8bit
from memtrain.optim.fused.sgd import SGD4bit, SGD8bit
from memtrain.optim.state_report import describe, predict, state_bytes
from memtrain.optim.states.compressed import CompressedOptimizer
from memtrain.optim.states.compressed_states import CompressedStates
from memtrain.optim.states.layout import Choice, StateRow
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.weights import SplitWeights

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
