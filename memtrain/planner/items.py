"""From traces to items: tensors saved together, and the worthy options of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from memtrain.activations.saved.pack import SHARED
from memtrain.activations.saved.site import Record, Site
from memtrain.compressors import Compressor, DerivativeCode, Group, Identity, Keep
from memtrain.compressors.fewbit.functions import CURVES
from memtrain.config.sources import KEEP
from memtrain.plan.file import spec
from memtrain.planner.groups import DERIVED, Groups, source_of, united
from memtrain.planner.levels import BALANCED, LOSSLESS, NARROW, WIDTHS, Widths
from memtrain.planner.noise import derived_error, relative_error
from memtrain.planner.solve import undominated
from memtrain.planner.traces import Trace, Traces

_PAYLOAD = "payload"
_UNASKED = Keep("")  # it is kept whatever the rules say


@dataclass
class Option:
    """What may be done to the tensors of an item."""

    name: str = KEEP
    """`keep`, `lossless`, or its lossy compressors: `derivative 3 + group 4`."""
    nbytes: int = 0
    """Kept from forward to backward."""
    error: float = 0.0
    """Sum over its sites of their relative squared errors, by analysis."""
    moved: int = 0
    """Bytes read and written by compressing and decompressing."""
    calls: int = 0
    """Of compressors, and of ops that run again, besides those in ops that are replaced."""
    choices: dict[Site, Compressor | Keep] = field(default_factory=dict)
    """What is done to each of its sites."""

    @property
    def families(self) -> str:
        """Its compressors without their widths."""
        return "".join(letter for letter in self.name if not letter.isdigit())


@dataclass
class Item:
    """Sites that share memory or lean on one another."""

    name: str
    """Of its first site."""
    sites: set[Site]
    options: list[Option]
    """`keep` first, then by bytes, the most first; none is beaten in everything by another of its
    family, and once errors are known by none at all."""
    balanced: Option
    """What the preset `balanced` does to it."""


class _Dial(NamedTuple):
    """What of a record follows a width."""

    name: str = ""
    """A field of `Widths`; empty: nothing does."""
    slope: int = 0
    """Bytes that each bit more takes."""


class _Cell(NamedTuple):
    """A record under a scheme, and what is done there."""

    record: Record
    choice: Compressor | Keep
    dial: _Dial
    root: Compressor | Keep
    """What is done to what it is computed again from, where it is; else to itself."""
    source: str = ""
    """The op whose output it is, where it is computed again."""
    first: bool = True
    """Of the records of one op's payload."""


_Dials = dict[tuple[Site, Compressor | Keep, int], _Dial]
"""Site, what is done to it and its bytes -> what follows a width."""


def items_of(traces: Traces) -> list[Item]:
    """Group the sites of all traces, and list what may be done to each group.

    Bytes at widths that were not traced are on the line through two that were: codes are packed to
    the bit.

    Args:
        traces: Of a model.

    Returns:
        Items in the order of the forward.
    """
    groups, dials = united(traces), _Dials()
    for scheme, narrow in traces.narrow.items():
        dials |= _dials(traces.at[scheme], narrow)
    parts = {id(trace): _by_item(trace, groups, dials) for trace in traces.at.values()}
    balanced = parts[id(traces.at[BALANCED])] if BALANCED in traces.at else {}
    items = []
    for top, sites in groups.sets().items():
        options = _worth([own.get(top, []) for own in parts.values()])
        items.append(Item(top.name, set(sites), options, _option(balanced.get(top, []), Widths())))
    return items


def _dials(wide: Trace, narrow: Trace) -> _Dials:
    found: _Dials = {}
    if [record.site for record in wide.records] != [record.site for record in narrow.records]:
        return found
    for one, other in zip(wide.records, narrow.records, strict=True):
        choices = (wide.choices.get(one.site), narrow.choices.get(one.site))
        name = _followed(*choices)
        if name and choices[0] is not None and bool(one.compressor) == bool(other.compressor):
            bits = getattr(Widths(), name) - getattr(NARROW, name)
            slope, rest = divmod(one.planned - other.planned, bits)
            if not rest:
                found[one.site, choices[0], one.planned] = _Dial(name, slope)
    return found


def _followed(wide: Compressor | Keep | None, narrow: Compressor | Keep | None) -> str:
    """The field of `Widths` that says a compressor's bits."""
    if isinstance(wide, DerivativeCode) and isinstance(narrow, DerivativeCode):
        names = ("code",)
    elif isinstance(wide, Group) and isinstance(narrow, Group):
        names = ("smooth", "rest")
    else:
        return ""
    both = (wide.bits, narrow.bits)
    own = (name for name in names if both == (getattr(Widths(), name), getattr(NARROW, name)))
    return next(own, "")


def _by_item(trace: Trace, groups: Groups, dials: _Dials) -> dict[Site, list[_Cell]]:
    cells: dict[Site, list[_Cell]] = {}
    latest: dict[str, _Cell] = {}
    before = None
    for record in trace.records:
        chosen = trace.choices.get(record.site, _UNASKED)
        dial = dials.get((record.site, chosen, record.planned), _Dial())
        cell = _Cell(record, chosen, dial, chosen, first=record.site != before)
        source = latest.get(source_of(record)) if record.compressor == DERIVED else None
        if source is not None:  # its error is that of what it leans on
            dial = _Dial(source.dial.name)
            cell = _Cell(record, chosen, dial, source.root, source_of(record))
        if record.shape:
            latest[record.site.op] = cell
        cells.setdefault(groups.find(record.site), []).append(cell)
        before = record.site if record.compressor == _PAYLOAD else None
    return cells


class _Value(NamedTuple):
    """What a record, or the sum of several, comes to."""

    nbytes: int = 0
    error: float = 0.0
    moved: int = 0
    calls: int = 0


def best(options: Sequence[Option]) -> list[Option]:
    """Keep, and those that no other option beats in everything.

    Args:
        options: Of an item, `keep` first.

    Returns:
        `keep` first, then by bytes, the most first.

    Example:
        >>> keep, wide, narrow = Option("keep", 8), Option("a", 4, 0.1), Option("b", 4, 0.2)
        >>> [option.name for option in best([keep, wide, narrow])]
        ['keep', 'a']
    """
    columns = [(own.nbytes, own.error, own.moved, own.calls) for own in options]
    rows = [row for row in undominated(np.array(columns, dtype=float)).tolist() if row]
    rest = sorted((options[row] for row in rows), key=lambda own: (-own.nbytes, own.error))
    return [options[0], *rest]


def _worth(schemes: Sequence[Sequence[_Cell]]) -> list[Option]:
    """Keep, and of all schemes and widths those that no other of their family beats."""
    keep = _option(schemes[0], Widths())
    families: dict[str, list[Option]] = {}
    for cells in schemes[1:]:
        widths, table = _table(cells)
        for row in undominated(table).tolist():
            option = _option(cells, widths[row])
            families.setdefault(option.families, []).append(option)
    families.pop(KEEP, None)
    return [keep, *(own for found in families.values() for own in best([keep, *found])[1:])]


def _table(cells: Sequence[_Cell]) -> tuple[list[Widths], np.ndarray]:
    """All widths that make a difference, and what the cells come to at each."""
    fixed, moving = np.zeros(4), dict[str, np.ndarray]()
    for cell in cells:
        name = cell.dial.name
        if not name:
            fixed += _value(cell, Widths())
            continue
        each = [_value(cell, Widths()._replace(**{name: bits})) for bits in WIDTHS]
        moving[name] = moving.get(name, np.zeros((len(WIDTHS), 4))) + each
    found, totals = [Widths()], fixed[None]
    for name, table in moving.items():
        found = [own._replace(**{name: bits}) for own in found for bits in WIDTHS]
        totals = (totals[:, None] + table[None]).reshape(-1, 4)
    return found, totals


def _value(cell: _Cell, widths: Widths) -> _Value:
    record, dial = cell.record, cell.dial
    nbytes = record.planned
    if dial.name:
        nbytes += dial.slope * (getattr(widths, dial.name) - getattr(Widths(), dial.name))
    root = _at(cell.root, dial, widths)
    if not record.compressor or isinstance(root, Keep | Identity):
        return _Value(nbytes)
    if record.compressor == _PAYLOAD:
        return _Value(nbytes, _error(cell, root) if cell.first else 0.0, 2 * nbytes)
    size = prod(record.shape) * getattr(torch, record.dtype).itemsize
    passes = 1 if record.reason == SHARED else 2  # decompressed only, or compressed before
    return _Value(nbytes, _error(cell, root), passes * size + 2 * nbytes, passes)


def _error(cell: _Cell, root: Compressor) -> float:
    record = cell.record
    if record.compressor.startswith(("Mask", "Integers")):
        return 0.0
    if cell.source and record.site.op not in CURVES:
        return derived_error(root, cell.source)
    return relative_error(root, record.site.op)


def _at(choice: Compressor | Keep, dial: _Dial, widths: Widths) -> Compressor | Keep:
    """The compressor at its width."""
    if dial.name and isinstance(choice, Group | DerivativeCode):
        return replace(choice, bits=getattr(widths, dial.name))
    return choice


def _option(cells: Sequence[_Cell], widths: Widths) -> Option:
    """The option of these widths, with its name and what is done to its sites."""
    choices: dict[Site, Compressor | Keep] = {}
    names: set[str] = set()
    packed = False
    for cell in cells:
        chosen = _at(cell.choice, cell.dial, widths) if not cell.source else cell.choice
        if cell.record.shape and chosen != _UNASKED:
            choices[cell.record.site] = chosen
        if isinstance(chosen, Keep) or not cell.record.compressor:
            continue
        packed = True
        if not cell.source and _error(cell, chosen):
            names.add(_named(chosen))
    name = " + ".join(sorted(names)) or (LOSSLESS if packed else KEEP)
    values = [_value(cell, widths) for cell in cells]
    nbytes, error, moved, calls = map(sum, zip(*values, strict=True)) if values else _Value()
    return Option(name, nbytes, error, moved, calls, choices)


def _named(chosen: Compressor) -> str:
    """As a plan file has it: `group 4`."""
    own = spec(chosen)
    return " ".join(str(own[field]) for field in ("name", "bits") if field in own)
