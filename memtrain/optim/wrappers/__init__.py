"""Optimizers around an optimizer: weights in two bytes, gradients released in the backward."""
