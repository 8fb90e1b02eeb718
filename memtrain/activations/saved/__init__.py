"""A saved tensor: where it comes from, what autograd holds in its place, and how it comes back."""
