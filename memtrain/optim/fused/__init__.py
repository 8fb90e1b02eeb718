"""Optimizers whose kernels decompress, step and compress in one launch."""
