"""Graphs that several equal modules run: records for each module, and bytes once."""

from collections.abc import Container, Mapping, Sequence

import torch
from torch import nn

from memtrain.activations.intercept.graph_saves import GraphSaves
from memtrain.activations.intercept.graph_sites import OWN_INPUT
from memtrain.activations.saved.site import Record


def records_of(
    graphs: Sequence[GraphSaves],
    model: nn.Module,
    given: Mapping[str, Sequence[int]],
    own: Container[int],
) -> list[Record]:
    """The records of what graphs save in one forward, also where modules share a graph.

    Graphs are in the order in which they were compiled. `given` maps the path of a module that is
    compiled by itself and was called to the storages of its inputs; `own` are storages that the
    user keeps alive.
    """
    found: list[Record] = []
    counted: dict[int, tuple[int, bool]] = {}  # a given storage -> its number, is it kept
    for graph in graphs:
        for path in [graph.root, *_siblings(graph.root, graphs, model, given)]:
            offset = 1 + max((record.storage for record in found), default=0)
            inputs = given.get(path, [])
            for record in graph.records:
                place = graph.places.get(record.storage, len(inputs))
                moved = _moved(record, graph.root, path, offset)
                if place < len(inputs) and inputs[place] in own and record.planned == record.nbytes:
                    moved = moved._replace(nbytes=0, planned=0, reason=OWN_INPUT)
                elif place < len(inputs):
                    moved = _once(moved, inputs[place], counted)
                found.append(moved)
    return found


def _siblings(
    root: str, graphs: Sequence[GraphSaves], model: nn.Module, compiled: Container[str]
) -> list[str]:
    """Paths of modules compiled by themselves that run the graphs of one equal to them.

    Of several that have graphs (the first block's input needs no gradient) it is the last one
    before them.
    """
    modules = dict(model.named_modules())
    if not root or root not in compiled or root not in modules:  # of a model that is gone
        return []
    own, roots = modules[root], {graph.root for graph in graphs}
    equal = [
        name
        for name, module in modules.items()
        if name and name in compiled and _equal(module, own)
    ]
    found: list[str] = []
    latest = next(name for name in equal if name in roots)
    for name in equal:
        latest = name if name in roots else latest
        if latest == root != name:
            found.append(name)
    return found


def _moved(record: Record, root: str, path: str, offset: int) -> Record:
    """The record of a module's graph, for the module at another path."""
    module = record.site.module
    if module == root or module.startswith(f"{root}."):
        module = f"{path}{module[len(root) :]}"
    site = record.site._replace(module=module)
    return record._replace(site=site, storage=record.storage + offset)


def _once(record: Record, given: int, counted: dict[int, tuple[int, bool]]) -> Record:
    """The record of a storage that other modules are given too, without what they count of it.

    The record has the bytes of its own graph, and `given` identifies the storage within the
    forward. `counted` maps it to its number and to whether it is kept; it is updated.
    """
    kept = record.planned == record.nbytes
    if given not in counted:
        if record.nbytes:
            counted[given] = record.storage, kept
        return record
    number, alive = counted[given]
    counted[given] = number, alive or (kept and record.nbytes > 0)
    planned = 0 if kept and alive else record.planned
    return record._replace(nbytes=0, planned=planned, storage=number)


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have one class and parameters of the same names and shapes."""
    return type(one) is type(other) and _shapes(one) == _shapes(other)


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in module.named_parameters()]
