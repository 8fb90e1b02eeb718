"""The models that `memtrain-report` knows by name."""
