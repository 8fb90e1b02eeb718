"""Few-bit tables: step functions that stand for the derivative of an activation."""
