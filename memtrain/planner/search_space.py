"""The choices of a plan for one model and batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.activations.intercept.recompute import blocks_of
from memtrain.audit.peak.predict import conditions
from memtrain.config.sources import Config
from memtrain.plan.plan import Plan, make_plan
from memtrain.planner.cost_model import Work, measure_forward
from memtrain.planner.goal import Goal, Progress, silent
from memtrain.planner.knapsack import Item, Option, Segment
from memtrain.planner.saved_tensors import saved_items
from memtrain.planner.schemes import RECOMPUTED


@dataclass(frozen=True)
class SearchSpace:
    """The options of every saved tensor and block."""

    segments: list[Segment]
    """The segments of the forward, in order."""
    work: Work
    plan: Plan
    """A plan that keeps everything; its config has the settings of weights and gradients."""

    @property
    def items(self) -> list[Item]:
        """The items of all segments, in order."""
        return [item for segment in self.segments for item in segment.items]


def gather(
    model: nn.Module,
    optimizer: Optimizer,
    config: Config,
    batch: Any,
    goal: Goal,
    progress: Progress = silent,
) -> SearchSpace:
    """Trace a forward under each scheme, and once with every block recomputed.

    The config's exceptions hold under every scheme; its rules do not.
    """
    keep = replace(config.activations, rules=[], sites={}, recompute=[])
    plan = make_plan(model, optimizer, replace(config, activations=keep))
    paths = blocks_of(model) if "recompute" in goal.names else []
    work = measure_forward(model, batch, paths)
    recomputed: dict[str, Option] = {}
    with conditions(model, goal.options):
        items = saved_items(
            plan, model, batch, quantise="quantise" in goal.names, progress=progress
        )
        if paths:
            for path, nbytes in _input_bytes(plan, model, batch, paths).items():
                seconds = work.get(path, Work()).seconds
                recomputed[path] = Option(seconds, nbytes, name=RECOMPUTED)
    return SearchSpace(_segments(model, items, paths, recomputed), work[""], plan)


def _input_bytes(plan: Plan, model: nn.Module, batch: Any, paths: list[str]) -> dict[str, int]:
    """Map each module to the bytes of the inputs that it keeps if all `paths` are recomputed."""
    every = replace(plan.config.activations, recompute=paths)
    plan = replace(plan, config=replace(plan.config, activations=every))
    found: dict[str, int] = {}
    for record in plan.trace(model, batch):
        if record.site.op == "recompute":
            found[record.site.module] = found.get(record.site.module, 0) + record.planned
    return found


def _segments(
    model: nn.Module, items: Sequence[Item], paths: Sequence[str], recomputed: Mapping[str, Option]
) -> list[Segment]:
    """Sort items into blocks; items between two blocks are a segment that cannot be recomputed."""
    segments: list[Segment] = []
    for item in items:
        owners = {_owner(site.module, paths) for site in item.sites}
        owner = owners.pop() if len(owners) == 1 else ""
        if not segments or segments[-1].name != owner:
            known = next((s for s in segments if owner and s.name == owner), None)
            if known is not None:
                known.items.append(item)
                continue
            segments.append(Segment([], recomputed.get(owner) if owner else None, name=owner))
        segments[-1].items.append(item)
    sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    rest = sum(sizes.values())
    for segment in segments:
        modules = {site.module for item in segment.items for site in item.sites}
        names = [
            name
            for name in sizes
            if name.rpartition(".")[0] in modules
            or (segment.name and name.startswith(segment.name))
        ]
        rest -= sum(sizes.pop(name) for name in names)
        segment.later = rest
        segment.transient = sum(item.options[0].nbytes for item in segment.items)
    return segments


def _owner(module: str, paths: Sequence[str]) -> str:
    return next((path for path in paths if f"{module}.".startswith(f"{path}.")), "")
