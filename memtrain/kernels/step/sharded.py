"""The step of rank-1 and factored states whose tensors are split over processes.

Both need numbers of the whole tensor between their two passes: the maxima, or the sums of
squares, of what other processes hold. All tensors' numbers travel in one collective.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from memtrain.kernels.dispatch import choose
from memtrain.kernels.step import shard
from memtrain.kernels.step.groups import inputs_of, same_kernels
from memtrain.kernels.step.shard import Pending, Shard, all_reduce
from memtrain.kernels.step.step import (
    Entry,
    Sums,
    average_factors,
    is_contiguous,
    is_supported,
    reduce_reference,
    unless_refused,
    update_reference,
)


def step(entries: Sequence[Entry]) -> None:
    """Step entries with a rank-1 or factored state and a `shard`.

    Each process of the shards' groups must call it with the same entries in the same order; parts
    may be empty. The new scales are bit for bit those of the whole tensor; the factors differ in
    the order of sums. On CUDA, Triton kernels step contiguous parts split by rows. The reference
    steps other parts one by one, with float32 tensors of a part's size.
    """
    plain = [k for k, entry in enumerate(entries) if not _by_kernels(entry)]
    groups = _begin({k: entry for k, entry in enumerate(entries) if k not in plain})
    sums: dict[int, Sums] = {k: reduce_reference(entries[k]) for k in plain}
    for positions, group in groups:
        sums |= dict(zip(positions, group.sums(), strict=True))
    # In the order of the entries on every process, whatever serves them there.
    _reduce([(entry, sums[k]) for k, entry in enumerate(entries)])
    for positions, group in groups:
        group.finalize_scales([sums[k] for k in positions])
        group.update()
        group.end()
    for k in plain:
        if entries[k].param.numel():
            update_reference(entries[k], sums[k])
        elif entries[k].kind == "rank1":
            scale = entries[k].states[1]["scale"]
            with unless_refused(entries[k], [scale]):
                scale.copy_(sums[k]["scale"])


def _by_kernels(entry: Entry) -> bool:
    if not entry.param.numel() or choose(entry.param) != "triton":
        return False
    return is_supported(entry) and is_contiguous(entry) and _shard(entry).by_rows


def _begin(entries: dict[int, Entry]) -> list[tuple[list[int], Any]]:
    """Run pass 1 by kernels; return groups with the positions of their entries."""
    if not entries:
        return []
    from memtrain.kernels.step.launch import TritonEntryGroup

    kinds: dict[object, list[int]] = defaultdict(list)
    for k, entry in entries.items():
        kinds[same_kernels(entry)].append(k)
    groups = []
    for positions in kinds.values():
        contiguous = [entries[k]._replace(grad=entries[k].grad.contiguous()) for k in positions]
        group = TritonEntryGroup(contiguous)
        group.begin(inputs_of(contiguous))
        group.reduce()
        groups.append((positions, group))
    return groups


def _shard(entry: Entry) -> Shard:
    return entry.shard or Shard(tuple(entry.param.shape), ())


def _reduce(found: Sequence[tuple[Entry, Sums]]) -> None:
    """Reduce maxima to those of the whole tensors, and write their factors to the entries."""
    maxima: Pending = []
    totals: Pending = []
    for entry, sums in found:
        if entry.kind == "rank1":
            maxima += shard.of_maxima(sums["scale"], entry.param.shape, _shard(entry))
        else:
            totals += shard.of_sums(sums["row"], sums["col"], _shard(entry))
    all_reduce(maxima, "max")
    all_reduce(totals, "sum")
    for entry, sums in found:
        if entry.kind == "factored":
            average_factors(entry, sums, _shard(entry))
