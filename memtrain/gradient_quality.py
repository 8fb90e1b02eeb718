"""Noise of a config's compressed activations in the gradient: site by site, and together."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.adaptive.noise_warning import noise_warning
from memtrain.activations.adaptive.replay import (
    Closure,
    Gradient,
    dot,
    gradient_replay,
    mean,
    squared_distance,
)
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved.saved_tensors import Choose
from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.call_arguments import call_arguments
from memtrain.api import plan_of
from memtrain.compressors import Compressor, Keep
from memtrain.plan.plan import Plan, activation_plan

EXACT = Keep("kept for the exact gradient")


class Quality(NamedTuple):
    """The error that compression adds to the gradient of one batch."""

    name: str
    """Of the site, or `all`."""
    cosine: float
    """Between the compressed and the exact gradient, mean over seeds. NaN if either is zero."""
    variance: float
    """Over seeds, as a share of the exact gradient's squared norm."""
    bias: float
    """Norm of the mean error over that of the exact gradient, corrected for the variance."""


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
    def warning(self) -> str:
        """A sentence where the variance is above 10% of the gradient's own, else empty.

        Compared to the variance from batch to batch where it is known, else to the squared norm.
        """
        known = self.batches is not None
        return noise_warning(
            {site.name: site.variance for site in self.sites or [self.whole]},
            self.batches if self.batches is not None else 1.0,
            "variance from batch to batch" if known else "squared norm",
            "a rule that gives them more bits, or keeps them,",
            self.whole.variance,
        )

    def table(self, top: int | None = None) -> Table:
        """Give a rich table: the whole, then the noisiest sites, `top` of them (all by default)."""
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


def gradient_quality(
    model: nn.Module,
    closure_or_batch: Any,
    cfg: Any = None,
    *,
    seeds: Sequence[int] = (0, 1, 2, 3),
    per_site: bool = True,
    warn: bool = True,
) -> GradientQuality:
    """Compare the gradient of one batch with the exact one, which plain PyTorch computes.

    Nothing of the model, its gradients or the random states is changed. It takes one pass, and one
    for each seed, for the whole plan and then for each site.

    Args:
        model: Wrapped by memtrain or not.
        closure_or_batch: A function that runs forward, loss and backward on one batch; or what the
            model is called with, whose loss is then the output's own `loss`, or else a random
            projection of the floats in the output.
        cfg: Anything that `memtrain.config.load` takes; None: the plan of a wrapped model, or
            `"balanced"`. Automatic bits are those of the plan, or uniform.
        seeds: Of the stochastic rounding, at least two.
        per_site: Whether each site is also measured alone, all others exact.
        warn: Whether to warn of the result's `warning`, where it has one.

    Returns:
        Cosine, relative variance and relative bias: `whole`, and `sites`. It prints as a table.

    Raises:
        ValueError: For fewer than two seeds, a closure that leaves no gradient, or a config that
            is not valid.
        TypeError: For a config of the wrong type.

    Warns:
        UserWarning: If the plan's variance is above 10% of the gradient's own from batch to batch
            (estimated from the halves of a batch with `labels`), or else of its squared norm.

    Memory:
        One gradient per seed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        >>> found = gradient_quality(model, torch.randn(32, 64), "balanced")
        >>> found.whole.cosine > 0.99, [site.name for site in found.sites]
        (True, ['1 / gelu / input', '2 / linear / input'])
    """
    plan = _plan(model, cfg)
    closure = (
        closure_or_batch if callable(closure_or_batch) else closure_of(model, closure_or_batch)
    )
    halves = [] if callable(closure_or_batch) else _halves(model, closure_or_batch)
    found = measure(
        model,
        closure,
        plan.choose_activation,
        seeds=seeds,
        per_site=per_site,
        options=plan.options,
        halves=halves,
    )
    if warn and found.warning:
        warnings.warn(found.warning, stacklevel=2)
    return found


def closure_of(model: nn.Module, batch: Any) -> Callable[[], None]:
    """Make a closure that runs a forward and a backward on a batch.

    Args:
        model: Called with the batch.
        batch: A tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        A function of no arguments; the loss is the output's own `loss`, or else a random
        projection of the floats in the output.
    """
    args, kwargs = call_arguments(batch)

    def run() -> None:
        output = model(*args, **kwargs)
        loss = getattr(output, "loss", None)
        (_projection(output) if loss is None else loss).backward()

    return run


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
    """Measure gradients with and without compression, as `gradient_quality`.

    Args:
        model: Wrapped or not; while this runs, only `choose` decides.
        closure: Runs forward and backward on one batch.
        choose: Site -> compressor, or the reason to keep the tensor.
        seeds: Of the stochastic rounding, at least two.
        per_site: Whether each site is measured alone, too.
        options: As of the plan.
        halves: The closure on each of two halves of its batch, whose mean is its loss.

    Raises:
        ValueError: For fewer than two seeds, or a closure that leaves no gradient.
    """
    if len(seeds) < 2:
        raise ValueError(f"seeds={list(seeds)}; allowed: two or more")
    records: list[Record] = []

    with gradient_replay(model) as gradient:

        def run(choice: Choose, seed: int, body: Closure = closure) -> Gradient:
            interception = Interception(
                model, choice, options=options, seed=seed, on_saved=records.extend
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
    """Give the variance of the mean of two independent gradients, over a squared norm."""
    if len(halves) != 2 or not norm:
        return None
    first, second = halves
    return squared_distance(first, second) / 4 / norm


def _groups(records: Sequence[Record]) -> dict[str, set[str]]:
    """Group compressed sites that save one tensor, by the name of the first."""
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
    variance = sum(squared_distance(gradient, average) for gradient in noisy) / (n - 1)
    # The mean over seeds errs by its own variance, which is no bias.
    bias = max(0.0, squared_distance(average, exact) - variance / n)
    return Quality(
        name,
        sum(cosines) / n,
        variance / norm if norm else float("nan"),
        (bias / norm) ** 0.5 if norm else float("nan"),
    )


def _cosine(gradient: Gradient, exact: Gradient, norm: float) -> float:
    own = dot(gradient, gradient)
    return dot(gradient, exact) / (own * norm) ** 0.5 if own * norm > 0 else float("nan")


def _halves(model: nn.Module, batch: Any) -> list[Callable[[], None]]:
    """Make a closure for each half of a batch; none where the model has no own loss."""
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    sizes = {x.shape[0] if x.dim() else 0 for x in leaves}
    if not isinstance(batch, Mapping) or "labels" not in batch or len(sizes) != 1 or min(sizes) < 2:
        return []
    n = min(sizes) // 2
    parts = (slice(n), slice(n, 2 * n))
    return [
        closure_of(model, tree_map_only(Tensor, lambda x, part=part: x[part], batch))
        for part in parts
    ]


def _plan(model: nn.Module, cfg: Any) -> Plan:
    if cfg is None and hasattr(model, "_memtrain"):
        return plan_of(model)
    return activation_plan(model, cfg)


def _projection(output: Any) -> Tensor:
    """Project all floats in the output on random numbers, the same every time."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("the model's output has no tensor that requires a gradient")
    drawn = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    return sum((x.float() * torch.randn(x.shape, **drawn).to(x.device)).sum() for x in leaves)  # type: ignore[return-value]
