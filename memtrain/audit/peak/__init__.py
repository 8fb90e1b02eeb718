"""The peak of a training step: how much is alive, when, and what it is."""

from memtrain.audit.peak.step import StepOptions
from memtrain.audit.peak.timeline import PARTS, Moment, Timeline

__all__ = ["PARTS", "Moment", "StepOptions", "Timeline"]
