"""accelerate's loop, its model compiled by `prepare`: `python examples/accelerate_compile.py`."""

from functools import partial

from accelerate_loop import run
from tiny import compiled_bytes, report

if __name__ == "__main__":
    compiled = partial(run, dynamo_backend="inductor")
    report(3, ["accelerate"], compiled, presets=["balanced"], saved=compiled_bytes)
