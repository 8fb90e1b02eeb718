"""How much of the gradient survives compression: site by site, and all together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import nn

from memtrain.activations.adaptive.noise_warning import complaint
from memtrain.activations.adaptive.replay import Closure, Gradient, distance, dot, mean, untouched
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved.pack import Choose
from memtrain.activations.saved.site import Record, Site
from memtrain.compressors import Compressor, Keep

EXACT = Keep("kept for the exact twin")


class Quality(NamedTuple):
    """What compression does to the gradient of one batch."""

    name: str
    """Of the site, or `all`."""
    cosine: float
    """Between the compressed and the exact gradient, mean over seeds. NaN if either is zero."""
    variance: float
    """Over seeds, as a share of the exact gradient's squared norm."""
    bias: float
    """Norm of the mean error over that of the exact gradient, less what the variance explains."""


class GradientQuality(NamedTuple):
    """The whole plan's quality, and each site's with all other sites exact.

    Sites that save one tensor are one row, under the name of the first.
    """

    whole: Quality
    sites: list[Quality]
    batches: float | None = None
    """Variance of the exact gradient from batch to batch, as a share of its squared norm, from the
    two halves of the batch; None where they are not known."""

    @property
    def complaint(self) -> str:
        """What is said where the variance is above 10% of the gradient's own, or an empty string.

        Compared to the variance from batch to batch where it is known, else to the squared norm.
        """
        known = self.batches is not None
        return complaint(
            {site.name: site.variance for site in self.sites or [self.whole]},
            self.batches if self.batches is not None else 1.0,
            "variance from batch to batch" if known else "squared norm",
            "a rule that gives them more bits, or keeps them,",
            self.whole.variance,
        )

    def table(self, top: int | None = None) -> Table:
        """A rich table: the whole, then the noisiest sites, `top` of them (all by default)."""
        table = Table("site", "cosine", "variance", "bias", title="gradient quality")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in [self.whole, *sorted(self.sites, key=lambda row: -row.variance)[:top]]:
            table.add_row(row.name, f"{row.cosine:.6f}", f"{row.variance:.2e}", f"{row.bias:.2e}")
        return table

    def __str__(self) -> str:
        console = Console(width=120)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def measure(
    model: nn.Module,
    closure: Closure,
    choose: Choose,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3),
    per_site: bool = True,
    options: Options = Options(),  # noqa: B008 - a constant
    halves: Sequence[Closure] = (),
) -> GradientQuality:
    """Measure gradients with and without compression; nothing of the model is changed.

    Args:
        model: Wrapped or not; while this runs, only `choose` decides.
        closure: Runs forward and backward on one batch.
        choose: Site -> compressor, or the reason to keep the tensor.
        seeds: Of the stochastic rounding, at least two.
        per_site: Whether each site is measured alone, too.
        options: As of the plan.
        halves: The closure on each of two halves of its batch, whose mean is its loss.

    Returns:
        The quality of the whole and, if asked for, of each site with a compressor.

    Raises:
        ValueError: For fewer than two seeds, or a closure that leaves no gradient.

    Memory:
        One gradient per seed.

    Example:
        >>> import torch
        >>> from memtrain.compressors import Group
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
        >>> x = torch.randn(32, 64)
        >>> found = measure(model, lambda: model(x).sum().backward(), lambda site: Group(bits=8))
        >>> found.whole.cosine > 0.999
        True
    """
    if len(seeds) < 2:
        raise ValueError(f"seeds={list(seeds)}; allowed: two or more")
    records: list[Record] = []

    with untouched(model) as gradient:

        def run(choice: Choose, seed: int, body: Closure = closure) -> Gradient:
            interception = Interception(
                model,
                choice,
                options=options,
                seed=seed,
                settle=records.extend,
            )
            with interception.alone():
                return gradient(body)

        def quality(name: str, choice: Choose) -> Quality:
            return _quality(name, exact, [run(choice, seed) for seed in seeds])

        exact = run(lambda site: EXACT, 0)
        parts = [run(lambda site: EXACT, 0, half) for half in halves]
        batches = _between(parts, dot(exact, exact))
        records.clear()
        whole = quality("all", choose)
        groups = _groups(records) if per_site else {}
        sites = [quality(name, _only(choose, names)) for name, names in groups.items()]
    return GradientQuality(whole, sites, batches)


def _between(halves: Sequence[Gradient], norm: float) -> float | None:
    """The variance of the mean of two independent gradients, over a squared norm."""
    if len(halves) != 2 or not norm:
        return None
    first, second = halves
    return distance(first, second) / 4 / norm


def _groups(records: Sequence[Record]) -> dict[str, set[str]]:
    """Compressed sites, those of one tensor together, by the name of the first."""
    first: dict[int, str] = {}
    groups: dict[str, set[str]] = {}
    for record in records:
        if record.compressor:
            leader = first.setdefault(record.storage, record.site.name)
            groups.setdefault(leader, set()).add(record.site.name)
    return groups


def _only(choose: Choose, names: set[str]) -> Callable[[Site], Compressor | Keep]:
    return lambda site: choose(site) if site.name in names else EXACT


def _quality(name: str, exact: Gradient, noisy: Sequence[Gradient]) -> Quality:
    n, norm = len(noisy), dot(exact, exact)
    cosines = [_cosine(gradient, exact, norm) for gradient in noisy]
    average = mean(noisy)
    variance = sum(distance(gradient, average) for gradient in noisy) / (n - 1)
    # The mean over seeds is off by its own variance, which is no bias.
    bias = max(0.0, distance(average, exact) - variance / n)
    return Quality(
        name,
        sum(cosines) / n,
        variance / norm if norm else float("nan"),
        (bias / norm) ** 0.5 if norm else float("nan"),
    )


def _cosine(gradient: Gradient, exact: Gradient, norm: float) -> float:
    own = dot(gradient, gradient)
    return dot(gradient, exact) / (own * norm) ** 0.5 if own * norm > 0 else float("nan")
