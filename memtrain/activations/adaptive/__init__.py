"""Bit widths that adapt while training runs: ActNN and GACT."""
