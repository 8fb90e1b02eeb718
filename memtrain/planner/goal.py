"""What a plan may do, and what it is for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from memtrain.activations.adaptive.replay import Closure
from memtrain.audit.peak import StepOptions
from memtrain.config.sources import nearest
from memtrain.planner.rates import Rates

ALLOWED = ("quantise", "recompute", "release", "weights")
"""What a plan may do: compress saved tensors and optimizer states; run blocks again; release
gradients inside the backward; keep weights in two bytes with a correction."""
Objective = Literal["time", "error"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is asked of a plan besides a budget of bytes.

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
        """What is allowed."""
        return set(self.allow)
