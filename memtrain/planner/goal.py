"""The goal of a plan for a budget, its promise, and the error where none fits."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from memtrain.activations.adaptive.replay import Closure
from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.timeline import GRADIENTS, SAVED, STATES, WEIGHTS
from memtrain.config.sizes import format_size
from memtrain.config.sources import KEEP, nearest
from memtrain.plan.plan import Plan
from memtrain.planner.cost_model import Rates
from memtrain.planner.schemes import LOSSLESS, TORCH

ALLOWED = ("quantise", "recompute", "release", "weights")
"""Compress saved tensors and optimizer states; recompute blocks; release gradients inside the
backward; keep weights in two bytes, with a correction or rounded stochastically."""
Told = Callable[[str, int, int], None]
"""Is told a stage of the planning, and how many of how many of its parts begin: 0 of 0 where they
are not counted."""
Objective = Literal["time", "error"]
_MEANS = {
    "quantise": "compresses saved tensors and optimizer states",
    "recompute": "recomputes blocks in the backward",
    "release": "lets each gradient go as soon as it is used",
    "weights": "keeps weights in 2 bytes, or in 3 with a correction",
}


def silent(stage: str, done: int, total: int) -> None:
    """Tell no one."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The constraints and the objective of a plan besides its budget of bytes.

    Raises:
        ValueError: For an unknown name, or a `max_error` below 0.

    Example:
        >>> sorted(Goal(allow="recompute").names)
        ['recompute']
    """

    allow: str | Iterable[str] = ("quantise", "recompute")
    """Of `ALLOWED`."""
    max_error: float = 1.0
    """The most noise, in units of the preset `balanced`'s: that of saved tensors in the gradient,
    and that of optimizer states in the update, each."""
    objective: Objective = "time"
    """`time`: the fastest step; `error`: the least noise."""
    rates: Rates = Rates()  # noqa: RUF009 (a frozen value)
    """Of the device."""
    closure: Closure | None = None
    """Runs forward and backward on one batch, for sensitivities; by default the batch's own."""
    sensitivity: Literal["auto", "analytic", "measured"] = "auto"
    """`measured` on the batch; `analytic`: from the compressors' variances; `auto`: measured where
    model and batch are real."""
    options: StepOptions = StepOptions()  # noqa: RUF009 (a frozen value)
    """Of the step whose peak is predicted."""

    def __post_init__(self) -> None:
        allow = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        object.__setattr__(self, "allow", allow)
        known = ("time", "error"), ("auto", "analytic", "measured")
        checks = [("allow", name, ALLOWED) for name in allow]
        checks += [
            ("objective", self.objective, known[0]),
            ("sensitivity", self.sensitivity, known[1]),
        ]
        for field, value, allowed in checks:
            if value not in allowed:
                raise ValueError(f"unknown {field} {value!r}; {nearest(str(value), allowed)}")
        if not self.max_error >= 0:
            raise ValueError(f"max_error={self.max_error} is out of range; allowed: 0 or more")

    @property
    def names(self) -> set[str]:
        """The names in `allow`."""
        return set(self.allow)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan that fits a budget, and its promise."""

    plan: Plan
    """Give it, or the file that it saves, to `memtrain.wrap`."""
    budget: int
    """Bytes."""
    peak: Moment
    """The moment when most is alive, by a step on fake tensors."""
    seconds: float
    """Of a step, by the rates."""
    plain_seconds: float
    """Of a step of plain PyTorch, by the same."""
    error: float
    """Noise in units of the preset `balanced`'s; of saved tensors or of states, the larger."""
    states: Mapping[str, int]
    """Variant of optimizer states -> how many parameters have it; those too small for a choice are
    left out."""
    chosen: Mapping[str, int]
    """Option -> how many groups of saved tensors have it; `recompute`: how many blocks."""
    rates: str
    """Of which device."""
    sensitivity: str
    """`measured` or `analytic`."""

    @property
    def slower(self) -> float:
        """Step time over that of plain PyTorch, less 1."""
        return self.seconds / self.plain_seconds - 1

    def rows(self) -> list[tuple[str, str]]:
        """Tell what is promised and what was chosen: a name, and a line about it."""
        config = self.plan.config
        chosen = ", ".join(f"{count} {_named(option)}" for option, count in self.chosen.items())
        kept = f"weights: {config.weights}; gradients: {config.gradients}"
        return [
            ("budget", format_size(self.budget)),
            ("promised peak", f"{format_size(self.peak.nbytes)}, in the {self.peak.label}"),
            ("step time", f"{self.slower:+.1%} against plain PyTorch, by {self.rates}"),
            ("noise", f"{self.error:.2f} of balanced's ({self.sensitivity})"),
            ("states", f"{_mixture(self.states)}; {kept}"),
            ("activations", chosen or "nothing to choose"),
        ]

    def lines(self) -> list[str]:
        """The same as text of 80 columns."""
        return [
            f"{'' if number else name:14}{line}"
            for name, text in self.rows()
            for number, line in enumerate(textwrap.wrap(text, 66))
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class DoesNotFit(ValueError):
    """No plan fits the budget.

    Args:
        budget: Bytes.
        smallest: The smallest peak that was reached.
        help: What would help, a line each.
    """

    def __init__(self, budget: int, smallest: Moment, help: Iterable[str]) -> None:
        self.budget, self.smallest, self.help = budget, smallest, tuple(help)
        super().__init__("\n".join(self.lines()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.budget, self.smallest, self.help)

    def lines(self) -> list[str]:
        """The message, line by line."""
        holds = sorted(self.smallest.parts.items(), key=lambda pair: -pair[1])
        least = self.smallest.nbytes / 1000
        return [
            f"budget={format_size(self.budget)} is too small: the smallest peak found is "
            f"{format_size(self.smallest.nbytes)}, in the {self.smallest.label}",
            "there it is held by "
            + ", ".join(
                f"{name} {format_size(nbytes)}" for name, nbytes in holds if nbytes > least
            ),
            *(f"what would help: {line}" for line in self.help),
        ]


def advice(
    budget: int,
    smallest: Moment,
    batch: Any,
    allowed: Iterable[str],
    names: Iterable[str],
    max_error: float = 1.0,
) -> list[str]:
    """Advise how to make a step fit, from what holds its smallest peak.

    Args:
        budget: Bytes.
        smallest: That moment.
        batch: What the model is called with; its first tensor's first size counts samples.
        allowed: Everything that could be allowed.
        names: What was.
        max_error: What was; one below 1 is the first that could be larger.

    Returns:
        Lines.
    """
    fixed = sum(smallest.parts.get(name, 0) for name in (WEIGHTS, GRADIENTS, STATES))
    rest = smallest.nbytes - fixed
    lines: list[str] = []
    sizes = [x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
    samples = sizes[0] if sizes else 1
    fits = int((budget - fixed) / rest * samples) if rest > 0 else samples
    if 1 <= fits < samples:
        lines.append(f"a batch of about {fits} in place of {samples} (and accumulated gradients)")
    elif rest > 0 and budget > fixed:
        share = (budget - fixed) / rest
        lines.append(f"shorter sequences or smaller images: about {share:.0%} of what a sample has")
    if fixed and rest < budget:
        lines.append(
            f"weights, gradients and states ({format_size(fixed)}) sharded over "
            f"{-(-fixed // (budget - rest))} devices"
        )
    known, allowed = set(names), [*allowed]
    missing = [name for name in allowed if name not in known]
    if missing:
        means = "; ".join(_MEANS[name] for name in missing)
        lines.append(f"allow={','.join(allowed)} ({means})")
    tight = max_error < 1 and "quantise" in known
    if tight or (smallest.parts.get(SAVED, 0) > rest // 2 and "recompute" not in missing):
        lines.append("a larger max_error")
    return lines


def _mixture(states: Mapping[str, int]) -> str:
    """One variant by its name; several with how many parameters each."""
    if len(states) < 2:
        return next(iter(states), TORCH)
    ordered = sorted(states.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{count} {name}" for name, count in ordered)


def _named(option: str) -> str:
    if option == "recompute":
        return "blocks recomputed"
    if option in (KEEP, LOSSLESS):
        return option
    return "with " + re.sub(r"(\w+) (\d)", r"\2-bit \1", option)
