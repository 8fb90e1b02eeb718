"""Training runs on real data: what `memtrain-train` does, in parts that tests can call."""
