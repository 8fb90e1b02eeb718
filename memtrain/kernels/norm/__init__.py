"""Norms whose normalised input is only ever codes."""
