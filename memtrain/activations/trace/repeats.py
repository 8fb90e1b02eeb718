"""Runs of identical blocks: three of them are traced, the others are the middle one, shifted."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtrain.activations.intercept.recompute import blocks_of
from memtrain.activations.saved.site import Record, Site

KEPT = 3
"""Blocks of a run that are traced: the first, the second and the last."""
_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _INTERNAL if name.endswith("_hooks"))


class Irregular(Exception):
    """A block of a run does something that its neighbour does not: all must be traced."""


class RepeatedBlocks(NamedTuple):
    """Consecutive blocks of a model that differ in nothing but the values of their weights."""

    paths: tuple[str, ...]
    """Of all blocks, in order; more than `KEPT`."""

    @property
    def container(self) -> str:
        """Path of the `ModuleList` or `Sequential` that holds them."""
        return self.paths[0].rpartition(".")[0]

    @property
    def kept(self) -> tuple[str, str, str]:
        """Paths of the blocks that are traced."""
        return self.paths[0], self.paths[1], self.paths[-1]

    @property
    def dropped(self) -> tuple[str, ...]:
        """Paths of the others, which all do what the second does."""
        return self.paths[2:-1]


def repeated_blocks(model: nn.Module) -> list[RepeatedBlocks]:
    """Find the runs of identical blocks among the blocks that a model repeats.

    Blocks are identical where their modules, and these modules' attributes, parameters and buffers
    are alike; a number may differ that is the block's own place. Parameters are of no two blocks.

    Args:
        model: Real or fake.

    Returns:
        Runs of more than `KEPT` blocks, in the model's order.

    Example:
        >>> layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> [run.paths for run in repeated_blocks(nn.Sequential(*(layer() for _ in range(4))))]
        [('0', '1', '2', '3')]
    """
    places: dict[str, list[str]] = {}
    for path in blocks_of(model):
        places.setdefault(path.rpartition(".")[0], []).append(path)
    found: list[RepeatedBlocks] = []
    for parent, paths in places.items():
        container = model.get_submodule(parent)
        order = {name: place for place, name in enumerate(container._modules)}
        described = [
            (order[path.rpartition(".")[2]], _described(model.get_submodule(path)))
            for path in paths
        ]
        groups = [[paths[0]]]
        for path, before, now in zip(paths[1:], described, described[1:], strict=False):
            same = now[0] == before[0] + 1 and _alike(before, now)
            groups[-1].append(path) if same else groups.append([path])
        found += [RepeatedBlocks(tuple(group)) for group in groups if len(group) > KEPT]
    return [run for run in found if _own_weights(model, run)]


def refined(runs: Sequence[RepeatedBlocks], classes: Callable[[str], Any]) -> list[RepeatedBlocks]:
    """Split runs where the class of a block is not that of the block before it.

    Args:
        runs: Of a model.
        classes: Path of a block -> its class.

    Returns:
        Runs of more than `KEPT` blocks of one class each.
    """
    found: list[RepeatedBlocks] = []
    for run in runs:
        groups: list[list[str]] = []
        before: Any = None
        for path in run.paths:
            now = classes(path)
            groups[-1].append(path) if groups and now == before else groups.append([path])
            before = now
        found += [RepeatedBlocks(tuple(group)) for group in groups if len(group) > KEPT]
    return found


@contextmanager
def shortened(model: nn.Module, runs: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Inside the block forwards of `model` pass through the kept blocks of runs only.

    Args:
        model: A copy; its containers of blocks are whole again after each forward.
        runs: Of its blocks.

    Raises:
        Irregular: For any error inside the block while blocks are left out, as code that needs all
            of them may raise anything.
    """
    if not runs:
        yield
        return
    whole: dict[nn.Module, Any] = {}

    def begin(module: nn.Module, args: Any) -> None:
        for path in {run.container for run in runs}:
            container = model.get_submodule(path)
            whole[container] = container._modules
            container._modules = _kept_children(container, [r for r in runs if r.container == path])

    def end(*_: Any) -> None:
        while whole:
            container, own = whole.popitem()
            container._modules = own

    handles = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    except Exception as error:
        left_out = ", ".join(path for run in runs for path in run.dropped)
        raise Irregular(f"fails without {left_out}") from error
    finally:
        for handle in handles:
            handle.remove()
        end()


def _kept_children(
    container: nn.Module, runs: Sequence[RepeatedBlocks]
) -> dict[str, nn.Module | None]:
    left_out = {path.rpartition(".")[2] for run in runs for path in run.dropped}
    rest = [(name, child) for name, child in container._modules.items() if name not in left_out]
    if all(name.isdigit() for name, _ in rest):  # they are asked for by their place
        rest = [(str(place), child) for place, (_, child) in enumerate(rest)]
    return dict(rest)


def renamed(path: str, block: str, other: str) -> str:
    """The path of what is in `other` where `path` is in `block`.

    Example:
        >>> renamed("h.1.mlp.act", "h.1", "h.7")
        'h.7.mlp.act'
    """
    return other + path[len(block) :]


def inside(path: str, block: str) -> bool:
    """Whether a path is that of a block, or of something in it.

    Example:
        >>> inside("h.1.mlp", "h.1"), inside("h.12", "h.1")
        (True, False)
    """
    return path == block or path.startswith(f"{block}.")


def unlike(
    runs: Sequence[RepeatedBlocks], choices: Mapping[Site, Any], choose: Callable[[Site], Any]
) -> list[RepeatedBlocks] | None:
    """Split the runs of whose blocks left out a site is chosen otherwise than in the second.

    Args:
        runs: That a forward was traced with.
        choices: What was chosen for the sites that it asked for.
        choose: Chooses for a site.

    Returns:
        None where all are chosen alike.
    """
    classes: dict[str, Any] = {}
    for run in runs:
        asked = dict.fromkeys(
            site._replace(module=site.module[len(block) :])
            for block in run.kept
            for site in choices
            if inside(site.module, block)
        )
        for path in run.paths:
            sites = [site._replace(module=path + site.module) for site in asked]
            classes[path] = [choices[s] if s in choices else choose(s) for s in sites]
    if all(classes[path] == classes[run.kept[1]] for run in runs for path in run.dropped):
        return None
    return refined(runs, classes.__getitem__)


def expanded(records: Sequence[Record], runs: Sequence[RepeatedBlocks]) -> list[Record]:
    """Add the records of the blocks that a forward left out.

    Args:
        records: Of a forward inside `shortened`.
        runs: Its runs.

    Returns:
        The records of the whole forward; storages are numbered in the order of the records.

    Raises:
        Irregular: If a record of a second block shares its storage with a block that is not its
            neighbour, or other modules save between two blocks.
    """
    for run in runs:
        records = _expanded(records, run)
    numbers: dict[int, int] = {}
    return [
        record._replace(storage=numbers.setdefault(record.storage, len(numbers)))
        for record in records
    ]


def _expanded(records: Sequence[Record], run: RepeatedBlocks) -> list[Record]:
    second = run.kept[1]
    kept = [
        next((k for k, p in enumerate(run.kept) if inside(r.site.module, p)), -1) for r in records
    ]
    if 1 not in kept:
        return [*records]
    begin, end = kept.index(1), len(kept) - kept[::-1].index(1)
    around = [own for own in kept if own >= 0]
    first, last = kept.index(around[0]), len(kept) - kept[::-1].index(around[-1])
    if around != sorted(around) or -1 in kept[first:last]:
        raise Irregular(f"other modules save before or after {second}")
    births = _births(records, kept, run)
    # What the last block shares with the first, all do: a mask, the angles of a rotary embedding.
    common = {record.storage for record, own in zip(records, kept, strict=True) if own == 2}
    common = {storage for storage in common if births[storage][0] == 0}
    made = {birth: storage for storage, birth in births.items()}
    fresh = {storage: place for place, (storage, (own, _)) in enumerate(births.items()) if own == 1}
    beyond = max(births, default=0) + 1

    def counterpart(storage: int, own: int, place: int) -> int:
        """Storage that is to the block at `place` what `storage` is to the kept block `own`."""
        block, which = births[storage]
        if block < 0 or storage in common:
            return storage
        there = place + block - own
        if there == block:
            return storage
        if (1, which) not in made or block > own:
            raise Irregular(f"{second} does not save what its neighbour does")
        one = made[1, which]
        return one if there == 1 else beyond + (there - 2) * len(births) + fresh[one]

    found = [*records[:end]]
    for place, path in enumerate(run.dropped, 2):
        for record in records[begin:end]:
            site = record.site._replace(module=renamed(record.site.module, second, path))
            found.append(record._replace(site=site, storage=counterpart(record.storage, 1, place)))
    for record in records[end:]:
        place = len(run.paths) - 1
        shared = births[record.storage][0] == 1  # with the block before
        storage = counterpart(record.storage, 2, place) if shared else record.storage
        found.append(record._replace(storage=storage))
    return found


def _births(
    records: Sequence[Record], kept: Sequence[int], run: RepeatedBlocks
) -> dict[int, tuple[int, Any]]:
    """Storage -> the kept block of its first record (-1: none), and which record of it that is."""
    found: dict[int, tuple[int, Any]] = {}
    counts = Counter[Any]()
    for record, own in zip(records, kept, strict=True):
        if record.storage not in found:
            tail = record.site.module[len(run.kept[own]) :] if own >= 0 else ""
            which = (own, tail, *record.site[1:], record.shape, record.dtype)
            found[record.storage] = own, (*which[1:], counts[which])
            counts[which] += 1
    return found


def _own_weights(model: nn.Module, run: RepeatedBlocks) -> bool:
    """Whether no two blocks share a module or a parameter."""
    blocks = [model.get_submodule(path) for path in run.paths]
    owned = [{id(p) for p in block.parameters()} for block in blocks]
    return len(set().union(*owned)) == sum(map(len, owned)) and len(set(blocks)) == len(blocks)


def _described(block: nn.Module) -> list[Any]:
    """All that a block's forward may depend on, but the values of its tensors."""
    found: list[Any] = []
    for name, module in block.named_modules():
        found += [name, type(module), module.training]
        found += [len(getattr(module, hooks)) for hooks in _HOOKS]
        for tensors in (module._parameters, module._buffers):
            for key, x in tensors.items():
                found += [key, *shown(x)]
        for key, value in vars(module).items():
            if key not in _INTERNAL:
                found.append(key)
                _flatten(value, found)
    return found


def _flatten(value: Any, found: list[Any]) -> None:
    if isinstance(value, Tensor):
        found += shown(value)
    elif isinstance(value, dict):
        found += [dict, len(value)]
        for key, inner in value.items():
            found.append(key)
            _flatten(inner, found)
    elif isinstance(value, list | tuple):
        found += [type(value), len(value)]
        for inner in value:
            _flatten(inner, found)
    else:
        found.append(value)


def shown(x: Any) -> tuple[Any, ...]:
    """Describe the part of an argument that a forward's ops depend on."""
    if isinstance(x, Tensor):
        strides = x.stride() if x.layout == torch.strided else ()
        return type(x).__name__, x.shape, strides, x.dtype, x.requires_grad
    return (x if isinstance(x, bool | str | type(None)) else type(x),)


def _alike(before: tuple[int, list[Any]], now: tuple[int, list[Any]]) -> bool:
    if len(before[1]) != len(now[1]):
        return False
    return all(
        a is b or (type(a) is type(b) and (a == b or (a, b) == (before[0], now[0])))
        for a, b in zip(before[1], now[1], strict=True)
    )
