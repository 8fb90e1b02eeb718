"""Where every byte of a training step goes: predicted, or measured on a real one."""

from memtrain.audit.report import audit

__all__ = ["audit"]
