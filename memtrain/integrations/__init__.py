"""Training frameworks with memtrain under them; each module imports its own framework only."""
