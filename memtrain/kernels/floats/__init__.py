"""Rounding to floating-point formats of up to 16 bits."""
