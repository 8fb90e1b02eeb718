"""Models that `memtrain-report` is asked for."""
