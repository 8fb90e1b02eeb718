"""Mixed precision: float formats, and the assignment of formats to tensors of training."""

from memtrain.kernels.floats.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FORMATS,
    FP8_BACKWARD,
    FP8_FORWARD,
    FP16,
    IEEE_FP16,
    FloatFormat,
    named_format,
)
from memtrain.precision.assignment import Precision

__all__ = [
    "BF16",
    "E4M3FN",
    "E5M2",
    "FORMATS",
    "FP8_BACKWARD",
    "FP8_FORWARD",
    "FP16",
    "IEEE_FP16",
    "FloatFormat",
    "Precision",
    "named_format",
]
