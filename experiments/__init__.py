"""Comparisons and a table of the papers, from a checkout; not part of the installed package."""
