"""The picture of `memtrain-fewbit --png`: a derivative and its steps."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from memtrain.compressors.fewbit.functions import curve
from memtrain.compressors.fewbit.step_function import Approximation


def draw(
    path: Path,
    function: str,
    parameters: tuple[float, ...],
    step: Approximation,
    interval: tuple[float, float],
) -> None:
    """Draw f' and its steps, written whole or not at all.

    Args:
        path: The PNG file; an older one is replaced.
        function: Its name.
        parameters: All of them.
        step: The table.
        interval: What to show.

    Raises:
        ImportError: Without matplotlib.
        OSError: If it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--png needs matplotlib: pip install 'memtrain[plot]'") from error
    x = np.linspace(*interval, 4001)
    figure = Figure(figsize=(8, 4), layout="constrained")  # no pyplot: no display, no state
    axes = figure.subplots()
    axes.plot(x, curve(function, parameters).slope(x), label="derivative", color="C7")
    axes.plot(x, step(x), label=f"{step.bits} bits", color="C0")
    axes.set(xlabel="x", title=f"{' '.join([function, *map('{:g}'.format, parameters)])}")
    axes.legend()
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(partial, format="png", dpi=150)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()
