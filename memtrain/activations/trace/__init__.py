"""What a forward would save, found on fake tensors."""
