"""Traces of a forward under fake tensors: the tensors that it would save for backward."""
