"""Bit widths that adapt while training runs: ActNN, GACT, and a warning of too much noise."""
