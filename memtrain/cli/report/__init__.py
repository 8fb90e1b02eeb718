"""`memtrain-report`: where every byte of a training step goes."""
