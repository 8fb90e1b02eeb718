"""What the planner chooses among: tensors saved together, and blocks that may run again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memtrain.activations.join import join
from memtrain.activations.sites import Record, Site
from memtrain.compressors import Compressor, Identity
from memtrain.config import KEEP, Config
from memtrain.plan import Plan, make_plan
from memtrain.planner.forward import Work, blocks_of, measure_forward
from memtrain.planner.levels import activation_rules, relative_error

_DERIVED = "derived"
_SINCE = "computed again from what "


@dataclass
class Option:
    """What one level does to the tensors of an item."""

    nbytes: int = 0
    """Kept from forward to backward."""
    plain: int = 0
    """Bytes of the tensors that are compressed and decompressed, before."""
    replaced: int = 0
    """Of these, of ops that are replaced: they write codes where they would keep a tensor."""
    error: float = 0.0
    """Sum over its sites of their relative squared errors, by analysis."""
    choices: dict[Site, Compressor | str] = field(default_factory=dict)
    """What is done to each of its sites."""


@dataclass
class Item:
    """Sites that share memory or lean on one another: one level holds for all."""

    name: str
    """Of its first site."""
    sites: set[Site]
    options: dict[str, Option]
    """By level; those with the same bytes as an earlier level are left out."""


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
    plans: dict[str, Plan]
    """By level: a plan with its rules."""

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
    levels: Sequence[str],
    recompute: bool,
) -> Candidates:
    """Trace a forward under each level, and once with every block recomputed.

    Args:
        model: Real or fake; not changed.
        optimizer: Not changed.
        config: Its exceptions hold at every level; its rules do not.
        batch: What the model is called with.
        levels: Of `LEVELS`, `keep` first.
        recompute: Whether blocks may run again.

    Returns:
        Blocks in the order of the forward.
    """
    plans = {level: _plan(model, optimizer, config, level) for level in levels}
    traces = {level: _traced(plan, model, batch) for level, plan in plans.items()}
    paths = blocks_of(model) if recompute else []
    work = measure_forward(model, batch, paths)
    starts: dict[str, int] = {}
    if paths:
        every = replace(config.activations, rules=[], sites={}, recompute=paths)
        plan = make_plan(model, optimizer, replace(config, activations=every))
        starts = _starts(plan.trace(model, batch))
    items = _items(traces)
    return Candidates(_blocks(model, items, paths, starts, work), work[""], plans)


class _Trace:
    """The records of a forward under one level, and what the rules say of each site."""

    def __init__(self, records: list[Record], choices: dict[Site, Compressor | str]) -> None:
        self.records, self.choices = records, choices


def _plan(model: nn.Module, optimizer: Optimizer, config: Config, level: str) -> Plan:
    own = replace(config.activations, rules=activation_rules(level), sites={}, recompute=[])
    return make_plan(model, optimizer, replace(config, activations=own))


def _traced(plan: Plan, model: nn.Module, batch: Any) -> _Trace:
    choices: dict[Site, Compressor | str] = {}

    def choose(site: Site) -> Compressor | str:
        choices[site] = plan.choose_activation(site)
        return choices[site]

    return _Trace(plan.trace(model, batch, choose), choices)


def _starts(records: Iterable[Record]) -> dict[str, int]:
    """Bytes of the inputs that recomputed modules keep, by module."""
    found: dict[str, int] = {}
    for record in records:
        if record.site.op == "recompute":
            found[record.site.module] = found.get(record.site.module, 0) + record.planned
    return found


def _items(traces: Mapping[str, _Trace]) -> list[Item]:
    plain = traces[KEEP].records
    groups = _Groups()
    for trace in traces.values():
        for record in trace.records:
            groups.add(record.site)
    for trace in traces.values():
        for row in join(plain, trace.records):
            groups.unite(row.sites)
        _unite_shared(groups, trace.records)
    items = {top: Item(top.name, sites, {}) for top, sites in groups.sets().items()}
    for level, trace in traces.items():
        options = {top: Option() for top in items}
        for record in trace.records:
            _count(options[groups.find(record.site)], record, trace.choices.get(record.site))
        for top, option in options.items():
            _keep_if_useful(items[top], level, option)
    return list(items.values())


def _unite_shared(groups: "_Groups", records: Sequence[Record]) -> None:
    """Unite sites of one storage, and those that are derived with what they lean on."""
    by_storage: dict[int, Site] = {}
    latest: dict[str, Site] = {}
    for record in records:
        if not record.shape:  # a note, not a tensor
            continue
        groups.unite((by_storage.setdefault(record.storage, record.site), record.site))
        if record.compressor == _DERIVED:
            op = record.reason.removeprefix(_SINCE).removesuffix(" keeps")
            if op in latest:
                groups.unite((latest[op], record.site))
        else:
            latest[record.site.op] = record.site


def _count(option: Option, record: Record, chosen: Compressor | str | None) -> None:
    option.nbytes += record.planned
    if chosen is None or not record.shape:
        return
    option.choices[record.site] = chosen
    if not record.compressor or isinstance(chosen, str | Identity):
        return
    size = _size(record)
    option.plain += size
    if record.compressor == "payload":
        option.replaced += size
    lossless = record.compressor.startswith(("Mask", "Integers"))
    option.error += 0.0 if lossless else relative_error(chosen, record.site.op)


def _size(record: Record) -> int:
    count = 1
    for length in record.shape:
        count *= length
    return count * _itemsize(record.dtype)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _keep_if_useful(item: Item, level: str, option: Option) -> None:
    """A level that saves no byte against the one before has nothing to offer."""
    least = min((known.nbytes for known in item.options.values()), default=None)
    if least is None or option.nbytes < least:
        item.options[level] = option


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


class _Groups:
    """Disjoint sets of sites, each known by its earliest (union-find)."""

    def __init__(self) -> None:
        self._above: dict[Site, Site] = {}
        self._rank: dict[Site, int] = {}

    def add(self, site: Site) -> None:
        self._rank.setdefault(site, len(self._rank))
        self._above.setdefault(site, site)

    def find(self, site: Site) -> Site:
        while self._above[site] != site:
            self._above[site] = self._above[self._above[site]]
            site = self._above[site]
        return site

    def unite(self, sites: Iterable[Site]) -> None:
        tops = sorted({self.find(site) for site in sites}, key=self._rank.__getitem__)
        for top in tops[1:]:
            self._above[top] = tops[0]

    def sets(self) -> dict[Site, set[Site]]:
        found: dict[Site, set[Site]] = {}
        for site in self._rank:
            found.setdefault(self.find(site), set()).add(site)
        return found
