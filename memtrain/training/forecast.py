"""A forecast of the most that a step takes, on the longest batch of a run's data."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.predict import UnpredictableError, predict
from memtrain.audit.peak.timeline import GRADIENTS
from memtrain.config.sources import Config
from memtrain.optim.wrappers.accumulate import sum_bytes
from memtrain.plan.entries import sum_compressor, training_dtypes
from memtrain.planner import DoesNotFit, Fit, Goal, fit


@dataclass(frozen=True, kw_only=True)
class LongestStep:
    """A step on the longest microbatch."""

    arguments: Any
    """Of the model, for that microbatch."""
    options: StepOptions
    """How the step runs."""
    buckets: bool = False
    """Whether DistributedDataParallel's buckets hold all gradients."""
    sharded: bool = False
    """Whether FSDP2 holds parts of the parameters."""

    def sums(self, model: nn.Module, own: Config) -> int:
        """Bytes that released gradients take besides: sums of microbatches, or buckets."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if own.gradients != "release":
            return 0
        if self.buckets:
            dtypes = training_dtypes(model, own)
            return sum(p.numel() * dtypes.get(p, p.dtype).itemsize for p in trained)
        sums = sum_compressor(own)
        return sum(sum_bytes(p, sums) for p in trained) if own.release.accumulate > 1 else 0

    def fit(
        self, model: nn.Module, optimizer: Optimizer, own: Config, goal: Goal, budget: int
    ) -> Fit:
        """Find the plan whose peak fits a budget.

        Raises:
            DoesNotFit: If there is none, with advice in keys of `memtrain-train`.
        """
        find = partial(fit, model, optimizer, self.arguments, cfg=own, goal=goal)
        try:
            found = find(budget)
            besides = self.sums(model, found.plan.config)
            if found.peak.nbytes + besides > budget:
                found = find(budget - besides)
        except DoesNotFit as error:
            raise DoesNotFit(budget, error.smallest, map(in_keys, error.help)) from error
        return replace(found, budget=budget)

    def peak(self, model: nn.Module, optimizer: Optimizer, own: Config | None) -> Moment:
        """Predict the moment when most is alive.

        Args:
            model: Before `wrap`.
            optimizer: Its optimizer.
            own: Memtrain's config; None for a plain run.

        Raises:
            UnpredictableError: If it cannot be predicted; says why.
        """
        if self.sharded:
            raise UnpredictableError("a step gathers FSDP2's parts, which no prediction knows")
        timeline = predict(model, optimizer, self.arguments, own, self.options)
        return with_sums(timeline.peak, 0 if own is None else self.sums(model, own))


def in_keys(advice: str) -> str:
    """The planner's advice, in keys of `memtrain-train`.

    Example:
        >>> in_keys("allow=quantise,release (lets each gradient go)")
        'planner.allow=[quantise,release] (lets each gradient go)'
    """
    advice = advice.replace("(and accumulated gradients)", "(training.accumulate)")
    return re.sub(r"^allow=(\S+)", r"planner.allow=[\1]", advice)


def with_sums(peak: Moment, sums: int) -> Moment:
    """The peak of a microbatch where sums of those before are held besides: at most so much."""
    if not sums:
        return peak
    parts = {**peak.parts, GRADIENTS: peak.parts.get(GRADIENTS, 0) + sums}
    return replace(peak, nbytes=peak.nbytes + sums, parts=parts)
