"""Accuracies of a sweep's runs, and what they differ by from fp32's, seed by seed.

`python -m experiments.tradeoff_table outputs/precision_epochs/results.csv` prints them; any files
of `python -m experiments precision_...` will do, several too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.seeds import by_run, difference, mean, table
from experiments.study import read

_RUN = ("family", "width", "steps", "lr")
_CELL = ("assignment", "ratio", "promotion")


def tradeoff_table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Tell means over seeds, and the difference from fp32 with its 95% interval.

    Args:
        rows: Lines of a sweep's results.csv.

    Returns:
        Lines of Markdown: one for each assignment and ratio of each family.

    Example:
        >>> run = {"family": "a", "width": "1", "steps": "8", "lr": "0.1", "low_ratio": "0.9"}
        >>> uniform = {**run, "assignment": "uniform", "ratio": "1.0", "promotion": "False"}
        >>> rows = [{**uniform, "seed": str(s), "accuracy": str(a)} for s, a in ((0, 0.5), (1, 0.6))]
        >>> rows += [{**row, "assignment": "fp32", "accuracy": "0.7"} for row in rows]
        >>> tradeoff_table(rows)[2]
        '| a, width 1, 8 steps of 0.1 | uniform, no promotion | 0.900 | 2 | 0.5500 | -0.1500 +- 0.6353 |'
    """  # noqa: E501
    told: list[tuple[str, ...]] = []
    for (family, width, steps, lr), cells in by_run(rows, _RUN, _CELL).items():
        fp32 = next((seeds for cell, seeds in cells.items() if cell[0] == "fp32"), {})
        for (assignment, ratio, promotion), seeds in cells.items():
            of = f" {ratio}" if assignment in ("size_ordered", "increasing", "random") else ""
            without = "" if assignment == "fp32" or promotion == "True" else ", no promotion"
            row = (
                f"{family}, width {width}, {steps} steps of {lr}",
                f"{assignment}{of}{without}",
                f"{mean(seeds, 'low_ratio'):.3f}",
                str(len(seeds)),
                f"{mean(seeds, 'accuracy'):.4f}",
                difference(seeds, fp32, "accuracy"),
            )
            told.append(row)
    heads = ("run", "assignment", "low-precision ratio", "seeds", "accuracy", "minus fp32")
    return table(heads, told)


if __name__ == "__main__":
    Console(soft_wrap=True, highlight=False, markup=False).print(
        "\n".join(tradeoff_table([row for path in sys.argv[1:] for row in read(Path(path))]))
    )
