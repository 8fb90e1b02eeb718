"""The bytes of a training step, site by site: predicted, or measured on a real one."""

from memtrain.audit.report import audit

__all__ = ["audit"]
