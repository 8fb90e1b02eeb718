"""Few-bit tables: step functions that approximate the derivative of an activation."""
