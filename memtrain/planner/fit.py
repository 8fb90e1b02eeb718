"""What the planner found, or why it found nothing, as a person reads it."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from memtrain.audit.peak import Moment
from memtrain.audit.peak.timeline import GRADIENTS, SAVED, STATES, WEIGHTS
from memtrain.config.sizes import format_size
from memtrain.config.sources import KEEP
from memtrain.plan.plan import Plan
from memtrain.planner.levels import LOSSLESS, TORCH

_MEANS = {
    "quantise": "compresses saved tensors and optimizer states",
    "recompute": "runs blocks again in the backward",
    "release": "lets each gradient go as soon as it is used",
    "weights": "keeps float32 weights in 3 bytes",
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A plan that fits a budget, and what it promises."""

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
    least_seconds: float | None
    """What no plan of these candidates with these temporaries can be faster than; None where time
    was not the objective."""
    error: float
    """Noise in units of the preset `balanced`'s; of saved tensors or of states, the larger."""
    exact: bool
    """Whether all plans were listed; else those of a relaxation."""
    states: Mapping[str, int]
    """What is done to optimizer states -> of how many parameters; those too small for a choice are
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
        """What is promised and what was chosen: a name, and a line about it."""
        config = self.plan.config
        chosen = ", ".join(f"{count} {_named(option)}" for option, count in self.chosen.items())
        found = "all plans compared" if self.exact else "a relaxation's plans compared"
        if self.least_seconds is not None:
            gap = max(0.0, self.seconds / self.least_seconds - 1) if self.least_seconds > 0 else 0.0
            found += f"; none is faster by more than {gap:.1%}"
        kept = f"weights: {config.weights}; gradients: {config.gradients}"
        return [
            ("budget", format_size(self.budget)),
            ("promised peak", f"{format_size(self.peak.nbytes)}, in the {self.peak.label}"),
            ("step time", f"{self.slower:+.1%} against plain PyTorch, by {self.rates}"),
            ("", found),
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
    """What would make a step fit, from what holds its smallest peak.

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
