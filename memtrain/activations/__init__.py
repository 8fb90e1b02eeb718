"""Saved tensors: which to compress, and how."""
