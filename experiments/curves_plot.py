"""Losses over the steps of training, a panel a task and a line a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.panels import grid


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Means of so many values each.

    Args:
        losses: Of each step.
        window: So many; the first mean is told at the step that completes it.

    Example:
        >>> smoothed([1.0, 3.0, 5.0], 2)
        [2.0, 4.0]
    """
    ends = range(window, len(losses) + 1)
    return [sum(losses[end - window : end]) / window for end in ends]


def draw(path: Path, panels: Mapping[str, Mapping[str, Sequence[float]]], baseline: str) -> None:
    """Draw one panel for each task; each line is a mean over a tenth of the steps.

    Args:
        path: The PNG.
        panels: Title -> name of a run -> each step's loss.
        baseline: The run that is drawn in black, wide, below the others.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the extra.
    """
    figure, axes = grid(len(panels))
    for axis, (title, runs) in zip(axes, panels.items(), strict=True):
        for name, losses in runs.items():
            window = max(1, len(losses) // 10)
            line = smoothed(losses, window)
            first = name == baseline
            style = {"color": "black", "linewidth": 3, "alpha": 0.4} if first else {"linewidth": 1}
            axis.plot(range(window, len(losses) + 1), line, label=name, **style)
        axis.set(title=title, xlabel="step", ylabel="loss")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
