"""Sweeps over float formats."""
