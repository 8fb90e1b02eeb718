"""Which runs a sweep over float formats makes: families and widths times assignments and seeds."""

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

WITHOUT_RATIO = ("fp32", "uniform", "operator", "operator_out")


class Cell(NamedTuple):
    """One run of a sweep."""

    family: str
    width: float
    assignment: str
    ratio: float
    promotion: bool
    seed: int


@dataclass(kw_only=True)
class GridConfig:
    """Assignments, each at every ratio, with and without promotion."""

    assignments: list[str] = field(default_factory=lambda: ["size_ordered"])
    """`fp32`, `uniform`, `operator`, `operator_out`, `size_ordered`, `increasing`, `random`."""
    ratios: list[float] = field(default_factory=lambda: [1.0])
    """Low-precision ratios, 0 to 1; the first four assignments have none, and run once."""
    promotions: list[bool] = field(default_factory=lambda: [True])
    """Whether tensors that overflow are promoted."""

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0 <= ratio <= 1:
                raise ValueError(f"sweep.grids.ratios={self.ratios}: {ratio}; allowed: 0 to 1")
        for name in ("assignments", "ratios", "promotions"):
            if not getattr(self, name):
                raise ValueError(f"sweep.grids.{name}=[] is empty; name at least one")


@dataclass(kw_only=True)
class SweepConfig:
    """Many runs of one experiment: every family and width, every seed, every line of the grids."""

    families: list[str] = field(default_factory=list)
    """Of `model.name=cifar`; none: no sweep."""
    widths: list[float] = field(default_factory=lambda: [1.0])
    """Width multipliers."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Of weights, order of images, and random assignments."""
    grids: list[GridConfig] = field(default_factory=list)
    """Which assignments, at which ratios."""

    def __post_init__(self) -> None:
        for name in ("widths", "seeds", "grids"):
            if self.families and not getattr(self, name):
                raise ValueError(f"sweep.{name}=[] is empty; name at least one")


def cells(sweep: SweepConfig) -> list[Cell]:
    """All runs, each once, seed by seed: what a sweep that is cut short has is complete seeds.

    Args:
        sweep: The sweep.

    Returns:
        The runs in order.

    Example:
        >>> grid = GridConfig(assignments=["uniform", "size_ordered"], ratios=[0.0, 0.5])
        >>> [(cell.assignment, cell.ratio) for cell in cells(SweepConfig(families=["a"], grids=[grid]))]
        [('uniform', 1.0), ('size_ordered', 0.0), ('size_ordered', 0.5)]
    """  # noqa: E501
    found: dict[Cell, None] = {}
    for seed, family, width, grid in product(
        sweep.seeds, sweep.families, sweep.widths, sweep.grids
    ):
        for assignment, promotion in product(grid.assignments, grid.promotions):
            ratios = [1.0] if assignment in WITHOUT_RATIO else grid.ratios
            for ratio in ratios:
                found[Cell(family, width, assignment, ratio, promotion, seed)] = None
    return list(found)
