"""The AdamW step of rank-1 and factored second moments whose tensors are split over processes.

Both need numbers of the whole tensor between their two passes: the maxima, or the sums of
squares, of what other processes hold. All tensors' numbers travel in one collective.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.codebook import block, rank1, row_column
from memtrain.kernels.codebook.codes import Book
from memtrain.kernels.dispatch import choose
from memtrain.kernels.step import adamw, shard
from memtrain.kernels.step import entries as stepped
from memtrain.kernels.step.adamw import BLOCK, FACTORED, FIRST, Entry
from memtrain.kernels.step.cuda_graph import Kept
from memtrain.kernels.step.scalars import Hyper, known, where
from memtrain.kernels.step.shard import Pending, Shard, all_reduce

Sums = dict[str, Tensor]
"""Of one entry: `scale` (rank-1's maxima), or `row` and `col` (sums of squares)."""


def step(entries: Sequence[Entry], kept: Kept | None = None) -> None:
    """`adamw.adamw_step` for entries of kind rank-1 or factored that have a `shard`.

    Each process of the shards' groups must call it, with the same entries in the same order; parts
    may be empty. The new scales are bit for bit those of the whole tensor, the factors are so but
    for the order of sums. On CUDA the kernels of `adamw_triton.py` serve contiguous parts split by
    rows; others, and the CPU, take torch's arithmetic, one parameter at a time.

    Args:
        entries: Each with the part of this process.
        kept: As `adamw.adamw_step` takes it.

    Memory:
        Vectors of rows and columns; in torch's arithmetic some float32 tensors of a part's size.
    """
    plain = [k for k, entry in enumerate(entries) if not _launches(entry)]
    launches = _launch({k: entry for k, entry in enumerate(entries) if k not in plain}, kept)
    found: dict[int, Sums] = {k: _look(entries[k]) for k in plain}
    for numbers, launch in launches:
        found |= dict(zip(numbers, launch.sums(), strict=True))
    # In the order of the entries on every process, whatever serves them there.
    _reduce([(entry, found[k]) for k, entry in enumerate(entries)])
    for numbers, launch in launches:
        launch.settle([found[k] for k in numbers])
        launch.update()
    for k in plain:
        _update(entries[k], found[k])


def _launches(entry: Entry) -> bool:
    if not entry.param.numel() or choose(entry.param) != "triton":
        return False
    if entry.kind not in adamw.KINDS:
        return False
    return adamw.fits(entry) and _shard(entry).by_rows


def _launch(entries: dict[int, Entry], kept: Kept | None) -> list[tuple[list[int], Any]]:
    """Pass 1 by kernels: launches, and which entries each serves."""
    if not entries:
        return []
    from memtrain.kernels.step import adamw_launch

    groups: dict[object, list[int]] = defaultdict(list)
    for k, entry in entries.items():
        groups[adamw_launch.alike(entry)].append(k)
    launches = []
    for numbers in groups.values():
        own = [entries[k]._replace(grad=entries[k].grad.contiguous()) for k in numbers]
        launches.append((numbers, adamw_launch.launch_of(own, kept)))
        launches[-1][1].look()
    return launches


def _shard(entry: Entry) -> Shard:
    return entry.shard or Shard(tuple(entry.param.shape), ())


def _gradient(entry: Entry) -> Tensor:
    p, h = entry.param, known(Hyper, entry.hyper)
    work = torch.float64 if p.dtype == torch.float64 else torch.float32
    g = entry.grad.to(work) * h.sign
    return where(h.l2, lambda: g + h.l2 * stepped.read(entry), g)


def _look(entry: Entry) -> Sums:
    g = _gradient(entry)
    if entry.kind == "rank1":
        return {"scale": rank1.maxima(_next_rank1(entry, g))}
    square = (g * g).float().reshape(g.shape[0], g.shape[1:].numel())
    return {"row": square.sum(1), "col": square.sum(0)}


def _next_rank1(entry: Entry, g: Tensor) -> Tensor:
    codes, scale, h = entry.second["codes"], entry.second["scale"], known(Hyper, entry.hyper)
    v = rank1.dequantize_reference(codes, scale, entry.second_map, 4, False, entry.param.shape)
    return h.b2 * v.to(g.dtype) + (h.w2 * g) * g


def _reduce(looked: Sequence[tuple[Entry, Sums]]) -> None:
    """The whole tensors' maxima; their factors, written to the entries."""
    maxima: Pending = []
    rows: Pending = []
    columns: Pending = []
    for entry, sums in looked:
        if entry.kind == "rank1":
            maxima += shard.of_maxima(sums["scale"], entry.param.shape, _shard(entry))
        else:
            rows += shard.of_rows(sums["row"], _shard(entry))
            columns += shard.of_columns(sums["col"], _shard(entry))
    all_reduce(maxima, "max")
    all_reduce([*rows, *columns], "sum")
    for entry, sums in looked:
        if entry.kind in FACTORED:
            whole, h = _shard(entry).shape, known(Hyper, entry.hyper)
            row, col = entry.second["row"], entry.second["col"]
            row.copy_(h.b2 * row + h.w2 * (sums["row"] / torch.Size(whole[1:]).numel()))
            col.copy_(h.b2 * col + h.w2 * (sums["col"] / whole[0]))
            sums["mean"] = shard.mean_of(row, col, _shard(entry))


def ratio(row: Tensor, mean: Tensor) -> Tensor:
    """Row means over their mean, zero where that is zero."""
    return (row / mean).masked_fill(mean == 0, 0.0)


def _update(entry: Entry, sums: Sums) -> None:
    if not entry.param.numel():
        if entry.kind == "rank1":
            entry.second["scale"].copy_(sums["scale"])
        return
    p, h, g = entry.param.detach(), known(Hyper, entry.hyper), _gradient(entry)
    m = adamw.decode_first(entry).to(g.dtype)
    m = m + h.w1 * (g - m)
    if entry.kind == "rank1":
        v = _next_rank1(entry, g)
    else:
        row, col = ratio(entry.second["row"], sums["mean"]), entry.second["col"]
        v = (row.unsqueeze(1) * col).view(p.shape).to(g.dtype)
    stepped.write(entry, stepped.read(entry) * h.decay - (h.step_size * m) / (v.sqrt() + h.eps))
    bits, size = FIRST.get(entry.kind, (4, BLOCK))
    codes, scale = block.quantize_reference(m, entry.first_map, bits, True, size)
    entry.first["codes"].copy_(codes)
    entry.first["scale"].copy_(scale)
    if entry.kind == "rank1":
        both = rank1.inverses(sums["scale"], p.shape)
        book = Book(entry.second_map, 4, False)
        entry.second["codes"].copy_(row_column.quantize_reference(v, both, book))
        entry.second["scale"].copy_(sums["scale"])
