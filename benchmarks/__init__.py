"""Measurements of what memtrain costs and saves: `python -m benchmarks list`, `... run [name]`."""
