"""What memtrain costs and saves, measured: `python -m benchmarks list`, `... run [name]`."""
