"""The zero point: what 4-bit codes make of the factors that AdamW's updates are scaled by.

    python -m experiments.zero_point                  trains, and writes outputs/zero_point.csv
    python -m experiments.zero_point --plot           draws it, as a PNG

The 4-bit paper's Figure 3 (arXiv:2309.01507): histograms of 1 / (sqrt(v) + 1e-6) of the second
moments v that float32 AdamW has at the end of a run, of the same in a compressor's codes, and so on
for each compressor. Codes that round a moment to 0 make a million of it. Runs are those of
`experiments.states_ablation`, of seed 0. The other key: `output=FILE`.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.panels import grid
from experiments.states_ablation import SECOND, second_moments
from experiments.study import KEY, Cell, Row, read

RUNS = (("digits", 0, 1e-3, 300), ("gpt_short", 0, 1e-3, 200))
"""Task, seed, learning rate and steps."""
ROWS = ("b128_de", "b128_de0", "rank1_linear")
"""Compressors of `states_ablation.SECOND` that are drawn."""
BINS = 10
"""To one power of ten."""
EPSILON = 1e-6
COLUMNS: tuple[str, ...] = (*KEY, "log10", "share")


def histogram(moments: Tensor) -> dict[int, float]:
    """Count second moments by their factor.

    Args:
        moments: Not below 0, [n].

    Returns:
        Number of a bin -> its share of all moments; bin `b` holds factors from 10 ** (b / BINS) on.

    Example:
        >>> histogram(torch.tensor([0.0, 1e-4, 1e-4, 0.9e-4]))
        {19: 0.5, 20: 0.25, 60: 0.25}
    """
    factors = moments.double().sqrt().add(EPSILON).reciprocal()
    # What rounds to a bin's edge belongs to it: 0 becomes a million exactly.
    bins, counts = torch.floor(BINS * factors.log10() + 1e-9).long().unique(return_counts=True)
    return dict(zip(bins.tolist(), (counts / len(moments)).tolist(), strict=True))


def lines() -> Iterator[Row]:
    """Lines of the CSV file: the float32 histogram of each run, then those of `ROWS`."""
    for task, seed, lr, steps in RUNS:
        exact, _ = second_moments(task, "fp32", seed, lr, steps)
        held = {row: second_moments(task, row, seed, lr, steps)[1] for row in ROWS}
        for row, moments in {"fp32": exact, **held}.items():
            cell: Cell = (task, row, seed, lr, steps)
            for number, share in histogram(moments).items():
                told = {"log10": number / BINS, "share": f"{share:.4g}"}
                yield dict(zip(KEY, cell, strict=True)) | told


def draw(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Draw a panel for each run and compressor, over the histogram of float32 in grey."""
    found: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for line in rows:
        bars = found.setdefault((line["task"], line["steps"]), {}).setdefault(line["variant"], {})
        bars[float(line["log10"])] = float(line["share"])
    panels = [(run, row) for run, held in found.items() for row in held if row != "fp32"]
    figure, axes = grid(len(panels))
    for axis, (run, row) in zip(axes, panels, strict=True):
        for name, colour in (("fp32", "0.75"), (row, "C3")):
            bars = found[run][name]
            style = {"color": colour, "alpha": 0.7, "label": SECOND.get(name, "float32")}
            axis.bar(list(bars), list(bars.values()), 1 / BINS, align="edge", **style)
        every = {edge for bars in found[run].values() for edge in bars}
        axis.set(title=f"{run[0]}, {run[1]} steps", xlabel="log10 of 1 / (sqrt(v) + 1e-6)")
        axis.set(xlim=(min(every), max(every) + 1 / BINS), ylabel="share", yscale="log")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """Read the command line, and count or draw; the exit status."""
    given: dict[str, str] = {}
    for item in arguments:
        name, _, value = item.partition("=")
        given[name] = value
    if unknown := sorted(set(given) - {"--plot", "output"}):
        print(f"unknown: {', '.join(unknown)}; allowed: --plot, output\n{__doc__}")  # noqa: T201
        return 2
    output = Path(given.get("output", "outputs/zero_point.csv"))
    if "--plot" in given:
        draw(output.with_suffix(".png"), read(output))
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
