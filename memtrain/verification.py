"""Comparison of a config's training step with the exact one: values, tensors and gradients."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.adaptive.replay import (
    Closure,
    Gradient,
    dot,
    gradient_replay,
    squared_distance,
)
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.checks import Checks
from memtrain.activations.saved.fit import Choose
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.site import Record, Site
from memtrain.activations.trace.call_arguments import call_arguments, check_order
from memtrain.api import plan_of
from memtrain.compressors import Compressor, Keep
from memtrain.plan.plan import Plan, activation_plan

if TYPE_CHECKING:  # rich draws from `random` when it is imported
    from rich.progress import Progress
    from rich.table import Table

EXACT = Keep("kept for the exact gradient")
BIASED = 0.25
"""A bias, as a share of the gradient's norm, above which a verdict is `biased`. Codes of
derivatives are rounded to the nearest, as in their paper: with 4 bits they leave 0.05 to 0.12."""
NOISY = 0.1
"""A share of the gradient's variance above which a warning is due (GACT's bound)."""
CERTAIN = 4
"""Standard errors that a bias must exceed."""
COLUMNS = (
    "cosine: between the compressed and the exact gradient g, mean over draws\n"
    "variance: over draws, relative to |g|^2; this noise averages out over steps\n"
    f"bias: norm of the mean error, relative to |g|; * above {BIASED}, and not by chance"
)
"""What the columns of the table are."""
SLIGHT = 0.01
"""A share of the whole gradient's norm below which no bias counts: some exact gradients are 0."""


class Quality(NamedTuple):
    """The error that compression adds to a gradient of one batch."""

    name: str
    """Of the site or parameter, or `all`."""
    cosine: float
    """Between the compressed and the exact gradient, mean over draws. NaN if either is zero."""
    variance: float
    """Over draws, as a share of the exact gradient's squared norm."""
    bias: float
    """Norm of the mean error over that of the exact gradient, corrected for the variance."""
    certain: bool
    """Whether the bias is too large to come from the variance, or from rounding: it is also above
    1% of the whole gradient's norm."""

    @property
    def is_biased(self) -> bool:
        """Whether the gradient is wrong in the mean over draws."""
        return self.certain and self.bias > BIASED


class Verification(NamedTuple):
    """What `verify` found; it prints as its verdict and tables."""

    whole: Quality
    """The whole gradient."""
    parameters: list[Quality]
    """The gradient of each parameter."""
    sites: list[Quality]
    """The whole gradient with one site compressed and all others exact, if that was asked for.
    Sites that save one tensor are one row, under the name of the first."""
    faults: list[str]
    """Saved tensors and replaced ops with other values than they may have, a sentence each."""
    tensors: int
    """Decompressed tensors that were compared."""
    ops: int
    """Replaced ops that were compared."""
    batches: float | None = None
    """Variance of the exact gradient from batch to batch, as a share of its squared norm, from the
    two halves of the batch; None where they are not known."""

    @property
    def biased(self) -> list[Quality]:
        """The parameters whose gradient is biased, the worst first."""
        return sorted((row for row in self.parameters if row.is_biased), key=lambda row: -row.bias)

    @property
    def ok(self) -> bool:
        """Whether no value is wrong and no gradient is biased; noise is no fault."""
        return not (self.faults or self.biased)

    @property
    def warning(self) -> str:
        """A sentence where the variance is above 10% of the gradient's own, else empty.

        Compared to the variance from batch to batch where it is known, else to the squared norm.
        """
        reference, name = self.batches, "variance from batch to batch"
        if reference is None:
            reference, name = 1.0, "squared norm"
        if not self.whole.variance > NOISY * reference:  # nor where either is NaN
            return ""

        def share(value: float) -> str:
            return f"{value / reference:.0%}" if reference else "more than 100%"

        rows = sorted(self.sites or self.parameters or [self.whole], key=lambda row: -row.variance)
        worst = ", ".join(f"{row.name} ({share(row.variance)})" for row in rows[:3])
        return (
            f"quantisation noise of the saved activations is {share(self.whole.variance)} of the "
            f"gradient's {name}, most of it from {worst}; a rule that gives them more bits, or "
            "keeps them, would lower it"
        )

    @property
    def verdict(self) -> str:
        """The result in a sentence or a few, for a person."""
        compared = f"{self.tensors} saved tensors and {self.ops} replaced ops were compared"
        if self.faults:
            shown = "; ".join(self.faults[:3])
            more = f"; and {len(self.faults) - 3} more" if len(self.faults) > 3 else ""
            return f"WRONG: {shown}{more} ({compared}). Keep these sites by a rule, and report this"
        if self.biased:
            shown = ", ".join(f"{row.name} ({row.bias:.0%} of its norm)" for row in self.biased[:3])
            return (
                f"BIASED: the mean gradient over draws is not the exact one for {shown}; "
                f"{compared}, without a fault. Keep what their modules save, or give it more bits"
            )
        noise = self.warning or (
            f"the noise of the gradient is {self.whole.variance:.2g} of its squared norm "
            f"(cosine {self.whole.cosine:.4f})"
        )
        return f"OK: {compared}, without a fault; no parameter's gradient is biased; {noise}"

    def table(self, top: int | None = None) -> "Table":
        """Return a rich table: the whole gradient, then at most `top` sites (else parameters)."""
        from rich.table import Table

        kind = "site" if self.sites else "parameter"
        table = Table(kind, "cosine", "variance", "bias", title="gradient quality")
        for column in table.columns[1:]:
            column.justify = "right"
        rows = sorted(self.sites or self.parameters, key=lambda row: (-row.variance, -row.bias))
        for row in [self.whole, *rows[:top]]:
            bias = f"{row.bias:.2e}{' *' if row.is_biased else ''}"
            table.add_row(row.name, f"{row.cosine:.6f}", f"{row.variance:.2e}", bias)
        return table

    def __str__(self) -> str:
        from rich.console import Console, Group

        console = Console(width=120)
        with console.capture() as capture:
            console.print(Group(self.verdict, self.table(), COLUMNS), highlight=False)
        return capture.get()


def verify(
    model: nn.Module,
    batch: Any,
    cfg: Any = None,
    *,
    draws: int = 4,
    per_site: bool = False,
    warn: bool = True,
    progress: bool = False,
) -> Verification:
    """Compare one training step under a config with the exact step.

    Values of replaced ops are compared with torch's ops, and decompressed tensors with the saved
    tensors. Each parameter's gradient is compared with the exact gradient, over several draws of
    the random bits. Its variance is noise, which averages out over steps; its bias does not. The
    model, its gradients and the random states are unchanged.

    Args:
        model: Any model, wrapped by memtrain or not.
        batch: The model's input, or a function that runs forward, loss and backward on one batch.
            With an input, the loss is the output's `loss`, or a random projection of the floats in
            the output.
        cfg: Anything that `memtrain.config.load` takes; None: the plan of a wrapped model, or
            `"balanced"`. Automatic bits are those of the plan, or uniform.
        draws: Number of draws of the random bits, at least two; two never show a bias.
        per_site: Whether to also measure each site separately, with `draws` passes per site.
        warn: Whether to warn about wrong values, biased gradients and large noise.
        progress: Whether to show a progress bar.

    Returns:
        The verdict and all measurements, which `print` shows. Parameters without a gradient have a
        cosine of NaN.

    Raises:
        ValueError: If `draws` is below two, the closure leaves no gradient, or the config is not
            valid.
        TypeError: If arguments have another order, or the config has a wrong type.

    Warns:
        UserWarning: If a value is wrong or a gradient is biased. Also if the plan's variance is
            above 10% of the gradient's variance between batches (estimated from the halves of a
            batch with `labels`), or, without labels, above 10% of its squared norm.

    Memory:
        One gradient per draw, and in one pass a copy of each saved tensor.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        >>> found = verify(model, torch.randn(32, 64), "balanced", per_site=True)
        >>> found.ok, found.whole.cosine > 0.99, [site.name for site in found.sites]
        (True, True, ['1 / gelu / input', '2 / linear / input'])
    """
    check_order(model, batch)
    plan = _plan(model, cfg)
    is_closure = callable(batch)
    closure = batch if is_closure else closure_of(model, batch)
    halves = [] if is_closure else _halves(model, batch)
    with _progress() if progress else nullcontext() as bar:
        found = measure(
            model,
            closure,
            plan.choose_activation,
            draws=draws,
            per_site=per_site,
            options=plan.options,
            halves=halves,
            bar=bar,
        )
    if warn and not (found.ok and not found.warning):
        warnings.warn(found.verdict, stacklevel=2)
    return found


def _progress() -> "Progress":
    from rich.progress import Progress

    return Progress(transient=True)


def closure_of(model: nn.Module, batch: Any) -> Callable[[], None]:
    """Return a function that runs a forward and a backward on a batch.

    The loss is the output's `loss`, or else a random projection of the floats in the output.
    """
    args, kwargs = call_arguments(batch)

    def run() -> None:
        output = model(*args, **kwargs)
        loss = getattr(output, "loss", None)
        (_projection(output) if loss is None else loss).backward()

    return run


def measure(  # noqa: PLR0913 - each is an argument of verify
    model: nn.Module,
    closure: Closure,
    choose: Choose,
    *,
    draws: int = 4,
    per_site: bool = False,
    options: Options = Options(),  # noqa: B008 - a constant
    halves: Sequence[Closure] = (),
    bar: "Progress | None" = None,
) -> Verification:
    """Compare a step with the exact one, as `verify`, with the choices of `choose`.

    `closure` runs forward and backward on one batch, and `halves` on its halves.
    """
    if draws < 2:
        raise ValueError(f"draws={draws}; allowed: two or more")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    records: list[Record] = []
    faults: dict[str, None] = {}
    checks = Checks(lambda fault: faults.setdefault(fault))

    with gradient_replay(model) as gradient:

        def run(choice: Choose, seed: int, body: Closure = closure, *, check: bool = False) -> Any:
            interception = Interception(
                model, choice, options=options, seed=seed, on_saved=records.extend
            )
            interception.saved.checks = checks if check else None
            with interception.alone():
                return gradient(body)

        def noisy(choice: Choose, first: int = 0, text: str = "all sites") -> list[Gradient]:
            seeds: Iterable[int] = range(first, first + draws)
            seeds = seeds if bar is None else bar.track(seeds, description=text)
            return [run(choice, seed) for seed in seeds]

        exact = run(lambda site: EXACT, 0)
        parts = [run(lambda site: EXACT, 0, half) for half in halves]
        batches = _between(parts, dot(exact, exact))
        run(choose, 0, check=True)
        records.clear()
        drawn = noisy(choose)
        whole, *parameters = _by_parameter(names, exact, drawn)
        if any(row.is_biased for row in parameters):  # one of many may seem biased by chance
            _, *others = _by_parameter(names, exact, noisy(choose, draws, "other random bits"))
            pairs = zip(parameters, others, strict=True)
            parameters = [a._replace(certain=a.certain and b.is_biased) for a, b in pairs]
        groups = _groups(records) if per_site else {}
        sites = [
            _by_parameter(names, exact, noisy(_only(choose, group), text=name))[0]._replace(
                name=name
            )
            for name, group in groups.items()
        ]
    return Verification(whole, parameters, sites, list(faults), checks.tensors, checks.ops, batches)


def _between(halves: Sequence[Gradient], norm: float) -> float | None:
    """Return the variance of the mean of two independent gradients, relative to a squared norm."""
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


_Products = tuple[Tensor, Tensor, Tensor]
"""Inner products, in float64, of an exact gradient g with g, of each draw's error with g, and of
the errors with each other."""


def _products(exact: Tensor, drawn: Sequence[Tensor]) -> _Products:
    g = exact.double().flatten()
    errors = torch.stack([x.double().flatten() - g for x in drawn])
    return (g @ g).cpu(), (errors @ g).cpu(), (errors @ errors.T).cpu()


def _by_parameter(names: Sequence[str], exact: Gradient, drawn: list[Gradient]) -> list[Quality]:
    """Return the quality of the whole gradient, and then that of each parameter's gradient."""
    parts = [_products(x, xs) for x, *xs in zip(exact, *drawn, strict=True)]
    norms, crosses, errors = zip(*parts, strict=True)
    whole = sum(norms), sum(crosses), sum(errors)
    pairs = zip(("all", *names), (whole, *parts), strict=True)
    return [_quality(name, part, float(whole[0])) for name, part in pairs]


def _quality(name: str, found: Any, whole: float) -> Quality:
    """Return the quality of a gradient from `_Products`; `whole` is the whole gradient's norm.

    Errors of two draws are independent, so the mean of their products is the squared bias. Its
    standard error is the jackknife's.
    """
    squared_norm, cross, products = found
    n, norm = len(cross), float(squared_norm)
    variance = max(0.0, float(products.trace() - products.sum() / n) / (n - 1))
    off = products - products.diag().diag()
    squared, spread = float(off.sum()) / (n * (n - 1)), float("inf")
    if n > 2:
        without = (off.sum() - 2 * off.sum(1)) / ((n - 1) * (n - 2))
        spread = float((n - 1) / n * (without - without.mean()).square().sum()) ** 0.5
    certain = squared > max(CERTAIN * spread, SLIGHT**2 * whole)
    drawn_norms = norm + 2 * cross + products.diag()
    cosine = float(((norm + cross) / (drawn_norms * norm).sqrt()).mean())  # NaN if either is zero
    if not norm:
        return Quality(name, cosine, float("nan"), float("nan"), certain)
    return Quality(name, cosine, variance / norm, (max(0.0, squared) / norm) ** 0.5, certain)


def _halves(model: nn.Module, batch: Any) -> list[Callable[[], None]]:
    """Return a closure for each half of a batch; none if the model computes no loss."""
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
    """Return the projection of all floats in the output on constant random numbers."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise ValueError("the model's output has no tensor that requires a gradient")
    drawn = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
    return sum((x.float() * torch.randn(x.shape, **drawn).to(x.device)).sum() for x in leaves)  # type: ignore[return-value]
