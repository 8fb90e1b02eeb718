"""Compressed optimizer states."""
