"""`memtrain-train budget=...`: the plan of the wrapped run, and its promise beside what came."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.audit.peak import StepOptions
from memtrain.config.sizes import format_size
from memtrain.config.sources import Config
from memtrain.planner import Fit, Goal, Rates, fit, measure_rates, read_rates

MEASURE = "measure"


@dataclass(kw_only=True)
class PlannerConfig:
    """How a plan is made where a budget is given."""

    allow: list[str] = field(default_factory=lambda: ["quantise", "recompute"])
    """Names of `memtrain.planner.ALLOWED`."""
    max_error: float = 1.0
    """The most noise, in units of the preset `balanced`'s."""
    objective: str = "time"
    """`time` or `error`."""
    rates: Any = None
    """The device's speed: a file of `memtrain-report --measure-rates`, `measure`, or the values
    themselves; byte counts by default."""

    def __post_init__(self) -> None:
        self.goal()

    def settled(self, device: str, *, autocast: bool) -> "PlannerConfig":
        """The same with the rates' values, so that a run that is resumed gets the same plan.

        Args:
            device: What `measure` times.
            autocast: Whether its arithmetic is in bfloat16.
        """
        if self.rates is None:
            return self
        found = (
            self._rates()
            if self.rates != MEASURE
            else measure_rates(device, dtype=torch.bfloat16 if autocast else torch.float32)
        )
        return replace(self, rates=asdict(found))

    def _rates(self) -> Rates:
        """What is known of them before anything is measured."""
        if self.rates is None or self.rates == MEASURE:
            return Rates()
        if isinstance(self.rates, str):
            return read_rates(self.rates)
        if not isinstance(self.rates, Mapping):
            raise TypeError(f"rates={self.rates!r}; allowed: a file, measure, or a mapping")
        return Rates(**self.rates)

    def goal(self, options: StepOptions = StepOptions()) -> Goal:  # noqa: B008 (a frozen value)
        """What the planner is asked; its errors come before anything runs."""
        return Goal(
            allow=self.allow,
            max_error=self.max_error,
            objective=self.objective,  # type: ignore[arg-type]
            rates=self._rates(),
            sensitivity="analytic",  # a run that is resumed gets the same plan
            options=options,
        )


def planned(
    budget: str | None,
    planner: PlannerConfig,
    model: nn.Module,
    optimizer: Optimizer,
    inputs: Tensor,
    own: Config,
    *,
    autocast: bool,
) -> Fit | None:
    """The plan whose peak fits, if a budget is given.

    Args:
        budget: Bytes for the peak of a step: `24GiB`.
        planner: How.
        model: Of the wrapped run.
        optimizer: Its optimizer.
        inputs: A batch.
        own: memtrain's keys.
        autocast: Whether forwards run under bfloat16.

    Returns:
        What the planner found; None without a budget.

    Raises:
        ValueError: If nothing fits, or the size is malformed.
    """
    if budget is None:
        return None
    options = StepOptions(autocast=torch.bfloat16 if autocast else None, loss=_loss)
    return fit(model, optimizer, inputs, budget, own, goal=planner.goal(options))


def promise(found: Fit, peak: int) -> str:
    """One line: the promised peak beside the measured one.

    Args:
        found: What the planner found.
        peak: Bytes, the highest of the metered steps; 0 if none was.
    """
    told = f"budget {format_size(found.budget)}: promised peak {format_size(found.peak.nbytes)}"
    if not peak:
        return f"{told}, measured: no step was metered"
    share = peak / found.peak.nbytes
    return f"{told}, measured {format_size(peak)} ({share:.3f} of it)"


def _loss(output: Any) -> Tensor:
    targets = torch.zeros(output.shape[:-1], dtype=torch.long, device=output.device)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())
