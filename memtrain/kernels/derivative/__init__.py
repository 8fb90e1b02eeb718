"""Few-bit derivative codes of nonlinearities, forward and backward."""
