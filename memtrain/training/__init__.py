"""Training runs on real data: the parts of `memtrain-train`."""
