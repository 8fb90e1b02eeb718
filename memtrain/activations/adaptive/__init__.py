"""Bit widths chosen while training runs, and what compression does to the gradient."""
