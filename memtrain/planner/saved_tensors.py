"""Forwards under each scheme, and the items and options of their saved tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from memtrain.activations.saved.saved_tensors import SHARED
from memtrain.activations.saved.site import Record, Site
from memtrain.audit.join import DisjointSets, join
from memtrain.compressors import Compressor, Keep
from memtrain.compressors.fewbit.functions import CURVES
from memtrain.config.sources import KEEP
from memtrain.plan.compressor_specs import compressor_spec
from memtrain.plan.plan import Plan
from memtrain.plan.rules import activation_rules as rules_of
from memtrain.planner.goal import Progress, silent
from memtrain.planner.knapsack import Item, Option, pareto_front
from memtrain.planner.noise import derived_error, relative_error
from memtrain.planner.schemes import (
    BALANCED,
    CODE,
    CODES,
    DEFAULT,
    GROUPS,
    LOSSLESS,
    NARROW,
    REST,
    SCHEMES,
    SMOOTH,
    activation_rules,
)

_PAYLOAD = "payload"
_NOT_REQUESTED = Keep("")  # kept under all rules


class SavedTensor(NamedTuple):
    """A record of a forward under a scheme, and the scheme's choice for its site."""

    record: Record
    choice: Compressor | Keep
    width: str = ""
    """The key of `DEFAULT` whose width its bytes follow; empty: the bytes are fixed."""
    slope: int = 0
    """Bytes per bit of width."""
    root: Compressor | Keep = _NOT_REQUESTED
    """Of a recomputed tensor: the choice for its source; else `choice`."""
    source: str = ""
    """Of a recomputed tensor: the op whose output it is."""
    first: bool = True
    """Whether this is the first record of an op's payload."""


_Trace = list[SavedTensor]


def saved_items(
    plan: Plan, model: nn.Module, batch: Any, *, quantise: bool, progress: Progress = silent
) -> list[Item]:
    """Trace a forward under each scheme, group the tensors that are saved together, list options.

    Bytes are linear in the width (codes are packed to the bit), so two traced widths give all. The
    plan's exceptions hold under every scheme; its rules do not. Without `quantise` the only scheme
    is `keep`.
    """
    pairs = [(name, DEFAULT) for name in (SCHEMES if quantise else (KEEP,))]
    pairs += [(name, NARROW) for name in ((CODES, GROUPS) if quantise else ())]
    traces = _traces([_under(plan, model, *pair) for pair in pairs], model, batch, progress)
    wide = {
        name: trace
        for (name, widths), trace in zip(pairs, traces, strict=True)
        if widths is DEFAULT
    }
    groups = _united(traces)
    slopes: dict[tuple[Any, ...], tuple[str, int]] = {}
    for (name, widths), trace in zip(pairs, traces, strict=True):
        if widths is NARROW:
            slopes |= _slopes(wide[name], trace)
    parts = {id(trace): _by_item(trace, groups, slopes) for trace in wide.values()}
    balanced = parts[id(wide[BALANCED])] if BALANCED in wide else {}
    items = []
    for top, sites in groups.sets().items():
        options = _candidates([part.get(top, []) for part in parts.values()])
        reference = _option(balanced.get(top, []), DEFAULT)
        items.append(Item(options, top.name, frozenset(sites), reference))
    return items


def pareto_options(options: Sequence[Option]) -> list[Option]:
    """Return the first option, `keep`, and the options that none dominates, largest first."""
    columns = [(option.nbytes, option.error, option.moved) for option in options]
    rows = [row for row in pareto_front(np.array(columns, dtype=float)).tolist() if row]
    rest = sorted((options[row] for row in rows), key=lambda option: (-option.nbytes, option.error))
    return [options[0], *rest]


def _under(plan: Plan, model: nn.Module, scheme: str, widths: Mapping[str, int]) -> Plan:
    """Return the plan with a scheme's rules for saved tensors, without states."""
    rules = activation_rules(scheme, widths)
    activations = replace(plan.config.activations, rules=rules, sites={}, recompute=[])
    paths = [name for name, _ in model.named_modules()]
    plan = replace(
        plan,
        config=replace(plan.config, activations=activations),
        activation_rules=rules_of(activations, paths),
        _entries={},
    )
    return replace(plan, bits=plan.automatic_bits())


def _traces(
    plans: Sequence[Plan], model: nn.Module, batch: Any, progress: Progress = silent
) -> list[_Trace]:
    """Trace a forward under each plan; plans with the same choices share a trace."""
    known: list[tuple[dict[Site, Compressor | Keep], _Trace]] = []
    found: list[_Trace] = []
    for number, plan in enumerate(plans, 1):
        progress("a forward under each scheme", number, len(plans))
        same = (
            trace
            for choices, trace in known
            if all(plan.choose_activation(site) == choice for site, choice in choices.items())
        )
        if (trace := next(same, None)) is None:
            choices: dict[Site, Compressor | Keep] = {}
            records = plan.trace(model, batch, choices)
            trace = [SavedTensor(r, choices.get(r.site, _NOT_REQUESTED)) for r in records]
            known.append((choices, trace))
        found.append(trace)
    return found


def _united(traces: Sequence[_Trace]) -> DisjointSets:
    """Return sets of sites whose bytes add up for any choice of each set."""
    unique = {id(trace): [saved.record for saved in trace] for trace in traces}
    plain, groups = unique[id(traces[0])], DisjointSets()
    for records in unique.values():
        for record in records:
            groups.add(record.site)
    for records in unique.values():
        for sites in join(plain, records):
            groups.union(sites)
        _unite_shared(groups, records)
    return groups


def _unite_shared(groups: DisjointSets, records: Sequence[Record]) -> None:
    """Unite sites of one storage, and recomputed sites with their sources."""
    by_storage: dict[int, Site] = {}
    latest: dict[str, Site] = {}
    for record in records:
        if not record.shape:  # a note, not a tensor
            continue
        groups.union((by_storage.setdefault(record.storage, record.site), record.site))
        if record.source:
            if record.source in latest:
                groups.union((latest[record.source], record.site))
        else:
            latest[record.site.op] = record.site


def _slopes(wide: _Trace, narrow: _Trace) -> dict[tuple[Any, ...], tuple[str, int]]:
    """Map site, choice and bytes of a saved tensor to the key of its width and the slope."""
    if [s.record.site for s in wide] != [s.record.site for s in narrow]:
        return {}
    found = {}
    for first, second in zip(wide, narrow, strict=True):
        name = _followed(first.choice, second.choice)
        if name and bool(first.record.compressor) == bool(second.record.compressor):
            bits = DEFAULT[name] - NARROW[name]
            slope, rest = divmod(first.record.planned - second.record.planned, bits)
            if not rest:
                found[first.record.site, first.choice, first.record.planned] = name, slope
    return found


def _followed(wide: Compressor | Keep, narrow: Compressor | Keep) -> str:
    """Return the key of `DEFAULT` whose width a compressor's bits are."""
    if isinstance(wide, Keep) or isinstance(narrow, Keep) or wide.bits is None:
        return ""
    names = (CODE,) if wide.gives_derivative and narrow.gives_derivative else (SMOOTH, REST)
    both = (wide.bits, narrow.bits)
    return next((name for name in names if both == (DEFAULT[name], NARROW[name])), "")


def _by_item(
    trace: _Trace, groups: DisjointSets, slopes: Mapping[tuple[Any, ...], tuple[str, int]]
) -> dict[Site, _Trace]:
    """Map the first site of an item to its saved tensors, each with its width and its root."""
    found: dict[Site, _Trace] = {}
    latest: dict[str, SavedTensor] = {}
    before = None
    for record, choice, *_ in trace:
        width, slope = slopes.get((record.site, choice, record.planned), ("", 0))
        saved = SavedTensor(record, choice, width, slope, choice, first=record.site != before)
        source = latest.get(record.source) if record.source else None
        if source is not None:  # its error is that of what it is computed from
            saved = SavedTensor(record, choice, source.width, 0, source.root, record.source)
        if record.shape:
            latest[record.site.op] = saved
        found.setdefault(groups.find(record.site), []).append(saved)
        before = record.site if record.compressor == _PAYLOAD else None
    return found


def _candidates(schemes: Sequence[_Trace]) -> list[Option]:
    """Return `keep`, and the Pareto front of all schemes and widths."""
    keep = _option(schemes[0], DEFAULT)
    found: list[Option] = []
    for tensors in schemes[1:]:
        widths, table = _table(tensors)
        found += [_option(tensors, widths[row]) for row in pareto_front(table).tolist()]
    return pareto_options([keep, *(option for option in found if option.name != KEEP)])


def _table(tensors: _Trace) -> tuple[list[Mapping[str, int]], np.ndarray]:
    """Return all widths that make a difference, and the costs at each: [widths, 3]."""
    fixed, moving = np.zeros(3), dict[str, np.ndarray]()
    for saved in tensors:
        if not (name := saved.width):
            fixed += _cost(saved, DEFAULT)
            continue
        each = np.array([_cost(saved, {**DEFAULT, name: bits}) for bits in _widths(name)])
        moving[name] = moving.get(name, np.zeros(each.shape)) + each
    found: list[Mapping[str, int]] = [DEFAULT]
    totals = fixed[None]
    for name, table in moving.items():
        found = [{**widths, name: bits} for widths in found for bits in _widths(name)]
        totals = (totals[:, None] + table[None]).reshape(-1, 3)
    return found, totals


def _widths(name: str) -> range:
    return range(NARROW[name], 9)


def _cost(saved: SavedTensor, widths: Mapping[str, int]) -> tuple[int, float, int]:
    """Return bytes, error and moved bytes."""
    record, nbytes = saved.record, saved.record.planned
    if saved.width:
        nbytes += saved.slope * (widths[saved.width] - DEFAULT[saved.width])
    root = _at(saved.root, saved, widths)
    if not record.compressor or isinstance(root, Keep) or root.is_identity:
        return nbytes, 0.0, 0
    if record.compressor == _PAYLOAD:
        return nbytes, _error(saved, root) if saved.first else 0.0, 2 * nbytes
    size = prod(record.shape) * getattr(torch, record.dtype).itemsize
    passes = 1 if record.reason == SHARED else 2  # decompressed only, or compressed before
    return nbytes, _error(saved, root), passes * size + 2 * nbytes


def _error(saved: SavedTensor, root: Compressor) -> float:
    record = saved.record
    if record.compressor.startswith("Integers"):
        return 0.0
    if saved.source and record.site.op not in CURVES:
        return derived_error(root, saved.source)
    return relative_error(root, record.site.op)


def _at(
    choice: Compressor | Keep, saved: SavedTensor, widths: Mapping[str, int]
) -> Compressor | Keep:
    """Return the compressor at its width."""
    if saved.width and not isinstance(choice, Keep):
        return choice.with_width(widths[saved.width])
    return choice


def _option(tensors: _Trace, widths: Mapping[str, int]) -> Option:
    """Return the option of these widths, with its name and the choice for each site."""
    choices: dict[Site, Compressor | Keep] = {}
    names: set[str] = set()
    packed = False
    for saved in tensors:
        chosen = saved.choice if saved.source else _at(saved.choice, saved, widths)
        if saved.record.shape and chosen != _NOT_REQUESTED:
            choices[saved.record.site] = chosen
        if isinstance(chosen, Keep) or not saved.record.compressor:
            continue
        packed = True
        if not saved.source and _error(saved, chosen):
            names.add(_named(chosen))
    name = " + ".join(sorted(names)) or (LOSSLESS if packed else KEEP)
    costs = [_cost(saved, widths) for saved in tensors]
    nbytes, error, moved = map(sum, zip(*costs, strict=True)) if costs else (0, 0.0, 0)
    return Option(0.0, nbytes, error, name, moved, choices)


@cache
def _named(chosen: Compressor) -> str:
    """Return the name of a compressor in a plan file: `group 4`."""
    spec = compressor_spec(chosen)
    return " ".join(str(spec[field]) for field in ("name", "bits") if field in spec)
