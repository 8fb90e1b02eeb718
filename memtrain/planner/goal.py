"""The goal of a plan for a budget, its promise, and the error where none fits."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memtrain.audit.peak import Moment, StepOptions, Timeline
from memtrain.config.sizes import format_size
from memtrain.config.sources import KEEP, nearest
from memtrain.plan.plan import Plan
from memtrain.planner.schemes import LOSSLESS, RECOMPUTED

ALLOWED = ("quantise", "recompute", "release", "weights")
"""Compress saved tensors and optimizer states; recompute blocks; release gradients inside the
backward; keep weights in two bytes, with a correction or rounded stochastically."""
Progress = Callable[[str, int, int], None]
"""Called with a stage of the planning, the number of the part that begins, and the number of parts
(both 0 if they are not counted)."""
Objective = Literal["time", "error"]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""


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
    """Names of `ALLOWED`."""
    max_error: float = 1.0
    """The most noise of saved tensors in the gradient, in units of the preset `balanced`'s, and of
    optimizer states in the update, in units of `optim=rank1_4bit`'s."""
    objective: Objective = "time"
    """`time`: the fastest step; `error`: the least noise."""
    options: StepOptions = StepOptions()  # noqa: RUF009 (a frozen value)
    """Options of the step whose peak is predicted."""

    def __post_init__(self) -> None:
        allow = (self.allow,) if isinstance(self.allow, str) else tuple(self.allow)
        object.__setattr__(self, "allow", allow)
        checks = [("allow", name, ALLOWED) for name in allow]
        checks += [("objective", self.objective, ("time", "error"))]
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
    """The plan, for `memtrain.wrap`."""
    budget: int
    """The budget in bytes."""
    timeline: Timeline
    """The predicted step."""
    seconds: float
    """Predicted time of a step, by `planner.cost_model`."""
    plain_seconds: float
    """Predicted time of a baseline step."""
    error: float
    """Noise in the units of `Goal.max_error`: the larger of saved tensors' and of states'."""
    states: str
    """Variant of optimizer states."""
    chosen: Mapping[str, int]
    """Option -> number of groups of saved tensors, or of blocks (`recompute`)."""

    @property
    def peak(self) -> Moment:
        """The peak, on CUDA with the allocator's cache and the context."""
        return self.timeline.needed

    @property
    def slower(self) -> float:
        """Step time relative to the baseline's, minus 1."""
        return self.seconds / self.plain_seconds - 1

    def rows(self) -> list[tuple[str, str]]:
        """Return the promises and the choices: a name and a text each."""
        config = self.plan.config
        chosen = ", ".join(f"{count} {_named(option)}" for option, count in self.chosen.items())
        kept = f"weights: {config.weights}; gradients: {config.gradients}"
        return [
            ("budget", format_size(self.budget)),
            ("promised peak", f"{format_size(self.peak.nbytes)}, in the {self.peak.label}"),
            ("step time", f"{self.slower:+.1%} against plain PyTorch, by byte counts"),
            ("noise", f"{self.error:.2f} of balanced's"),
            ("states", f"{self.states}{self._host_text()}; {kept}"),
            ("activations", chosen or "nothing to choose"),
        ]

    def _host_text(self) -> str:
        """Return the place of the states if they are not on the device."""
        nbytes = sum(entry.host for entry in self.plan.entries())
        text = f", in host memory ({format_size(nbytes)} there with copies of weights)"
        return text if nbytes else ""

    def lines(self) -> list[str]:
        """Return the rows as text of 80 columns."""
        return [
            f"{'' if number else name:14}{line}"
            for name, text in self.rows()
            for number, line in enumerate(textwrap.wrap(text, 66))
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


class DoesNotFit(ValueError):
    """No plan fits the budget in bytes; `smallest` is the smallest known peak, `help` the fixes."""

    def __init__(self, budget: int, smallest: Moment, help: Iterable[str]) -> None:
        self.budget, self.smallest, self.help = budget, smallest, tuple(help)
        super().__init__("\n".join(self.lines()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.budget, self.smallest, self.help)

    def lines(self) -> list[str]:
        """Return the message, line by line."""
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


def _named(option: str) -> str:
    if option == RECOMPUTED:
        return "blocks recomputed"
    if option in (KEEP, LOSSLESS):
        return option
    return "with " + re.sub(r"(\w+) (\d)", r"\2-bit \1", option)
