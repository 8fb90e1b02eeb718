"""A figure with a panel for each of several things, without a display."""

from typing import Any

from memtrain.training.results import new_figure


def grid(
    count: int, columns: int = 3, size: tuple[float, float] = (4.6, 3.4)
) -> tuple[Any, list[Any]]:
    """Make a figure.

    Args:
        count: So many panels.
        columns: So many beside each other, or fewer.
        size: Width and height of a panel, in inches.

    Returns:
        The figure, and its axes from left to right, row by row.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    figure = new_figure(size[0] * columns, size[1] * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]
