"""The peak of a training step: how much is alive, when, and what it is."""

from memtrain.audit.peak.timeline import PARTS, Moment, Timeline
from memtrain.audit.peak.training_step import StepOptions

__all__ = ["PARTS", "Moment", "StepOptions", "Timeline"]
