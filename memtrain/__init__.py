"""memtrain makes PyTorch training fit: one line, a fraction of the bytes, the same result."""
