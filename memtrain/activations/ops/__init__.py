"""Ops in forms that save payloads; one file a family."""
