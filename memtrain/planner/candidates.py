"""What the planner chooses among: tensors saved together, and blocks that may run again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.activations.intercept.recompute import blocks_of
from memtrain.activations.saved.site import Record
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import conditions
from memtrain.config.sources import Config
from memtrain.plan.plan import Plan, make_plan
from memtrain.planner.forward import Work, measure_forward
from memtrain.planner.items import Item, items_of
from memtrain.planner.traces import Traces


@dataclass
class Block:
    """A part of the forward, in its order."""

    name: str
    """Path of the module; of what belongs to no block, the first module's."""
    items: list[Item]
    recompute: bool
    """Whether it may keep its inputs only, and run again."""
    inputs: int = 0
    """Bytes of those inputs."""
    work: Work = Work()  # noqa: RUF009 (a frozen value)
    """Of its forward."""
    later_gradients: int = 0
    """Bytes of the gradients of all that comes after it."""


@dataclass
class Candidates:
    """All that a plan for one model and batch is made of."""

    blocks: list[Block]
    work: Work
    """Of the whole forward."""
    plan: Plan
    """That keeps everything."""

    @property
    def items(self) -> list[Item]:
        """Of all blocks, in order."""
        return [item for block in self.blocks for item in block.items]


def gather(
    model: nn.Module,
    optimizer: Optimizer,
    config: Config,
    batch: Any,
    *,
    quantise: bool,
    recompute: bool,
    step: StepOptions = StepOptions(),  # noqa: B008 (a frozen value)
) -> Candidates:
    """Trace a forward under each scheme, and once with every block recomputed.

    Args:
        model: Real or fake; not changed.
        optimizer: Not changed.
        config: Its exceptions hold under every scheme; its rules do not.
        batch: What the model is called with.
        quantise: Whether saved tensors may be compressed.
        recompute: Whether blocks may run again.
        step: Its device and autocast.

    Returns:
        Blocks in the order of the forward.
    """
    none = replace(config.activations, rules=[], sites={}, recompute=[])
    plan = make_plan(model, optimizer, replace(config, activations=none))
    paths = blocks_of(model) if recompute else []
    work = measure_forward(model, batch, paths)
    starts: dict[str, int] = {}
    with conditions(model, step):
        items = items_of(Traces(plan, model, batch, quantise=quantise))
        if paths:
            every = replace(plan.config.activations, recompute=paths)
            again = replace(plan, config=replace(plan.config, activations=every))
            starts = _starts(again.trace(model, batch))
    return Candidates(_blocks(model, items, paths, starts, work), work[""], plan)


def _starts(records: Iterable[Record]) -> dict[str, int]:
    """Bytes of the inputs that recomputed modules keep, by module."""
    found: dict[str, int] = {}
    for record in records:
        if record.site.op == "recompute":
            found[record.site.module] = found.get(record.site.module, 0) + record.planned
    return found


def _blocks(
    model: nn.Module,
    items: Sequence[Item],
    paths: Sequence[str],
    starts: Mapping[str, int],
    work: Mapping[str, Work],
) -> list[Block]:
    """Items in their blocks; what is between two blocks is a block that cannot run again."""
    blocks: list[Block] = []
    for item in items:
        owners = {_owner(site.module, paths) for site in item.sites}
        owner = owners.pop() if len(owners) == 1 else ""
        if not blocks or blocks[-1].name != owner:
            known = next((block for block in blocks if owner and block.name == owner), None)
            if known is not None:
                known.items.append(item)
                continue
            blocks.append(Block(owner, [], recompute=bool(owner) and owner in starts))
        blocks[-1].items.append(item)
    gradients = _Gradients(model)
    for block in blocks:
        block.inputs = starts.get(block.name, 0)
        block.work = work.get(block.name, Work()) if block.name else Work()
        block.later_gradients = gradients.after(block)
    return blocks


def _owner(module: str, paths: Sequence[str]) -> str:
    return next((path for path in paths if f"{module}.".startswith(f"{path}.")), "")


class _Gradients:
    """How many bytes of gradients are there when the backward reaches a block."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
        self.rest = sum(self.sizes.values())

    def after(self, block: Block) -> int:
        modules = {site.module for item in block.items for site in item.sites}
        mine = [
            name
            for name in self.sizes
            if name.rpartition(".")[0] in modules or (block.name and name.startswith(block.name))
        ]
        self.rest -= sum(self.sizes.pop(name) for name in mine)
        return self.rest
