"""Tables and launches of the Triton AdamW step (`adamw_triton.py` has the kernels)."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.codebook import block, rank1
from memtrain.kernels.step import adamw_triton, cuda_graph, cuda_graph_triton
from memtrain.kernels.step.adamw import KINDS, Entry, payload_parts
from memtrain.kernels.step.cuda_graph import Kept
from memtrain.kernels.step.scalars import is_on_device, together

kernels: Any = adamw_triton  # launches take options that no signature shows


def step(entries: Sequence[Entry], kept: Kept | None = None) -> None:
    """`adamw.adamw_step` for contiguous parameters: a few launches for each kind and dtype."""
    groups: dict[object, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[alike(entry)].append(entry)
    for group in groups.values():
        launch = launch_of(group, kept)
        launch.look()
        launch.settle()
        launch.update()


def alike(entry: Entry) -> Hashable:
    """Equal for entries that one `Launch` serves."""
    p, beside = entry.param, entry.beside
    numbers_too = is_on_device(entry.hyper)
    return p.device, entry.kind, p.dtype, entry.grad.dtype, beside.form, numbers_too


def launch_of(entries: list[Entry], kept: Kept | None) -> "Launch":
    """A launch for entries that are alike, from those that are kept."""
    key = alike(entries[0]), *map(_held, entries)
    kept = kept if is_on_device(entries[0].hyper) else None
    return cuda_graph.launch_of(Launch, entries, key, kept)


def _held(entry: Entry) -> Hashable:
    tensors = [entry.param, *entry.first.values(), *entry.second.values()]
    return cuda_graph.held(entry, tensors, (entry.first_map, entry.second_map))


class Launch:
    """The passes over contiguous parameters of one kind and dtype.

    Args:
        entries: As `adamw.adamw_step` takes them; their gradients are contiguous.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.kind, self.device = entries[0].kind, entries[0].param.device
        self.sides = _rank1_sides(entries) if self.kind == "rank1" else _factored_sides(entries)
        self._hyper = together([entry.hyper for entry in entries], self.device)
        self._table = _table(entries, self.sides).to(self.device)
        self._form = {"KIND": KINDS.index(self.kind), "KEPT": entries[0].beside.form}
        self._programs = self._count_programs()

    def renew(self, entries: list[Entry]) -> None:
        """For another step of entries that hold the same tensors, but for gradients."""
        self.entries = entries
        self._hyper = together([entry.hyper for entry in entries], self.device)
        cuda_graph_triton.point(self._table, kernels.G.value, [entry.grad for entry in entries])
        if self.kind != "rank1":
            return
        new = [side[name] for side in self.sides for name in ("row_new", "col_new")]
        torch._foreach_zero_(new)
        for entry, side in zip(entries, self.sides, strict=True):
            shape = entry.param.shape
            if len(shape) != 2:  # else it is a part of the scales themselves
                side["col_old"].copy_(rank1.columns(entry.second["scale"], shape))

    def _count_programs(self) -> dict[str, Tensor]:
        sizes = list(map(_matrix, self.entries))
        width = 128 * kernels.BLOCKS.value
        counts = {"update": [-(-rows * cols // width) for rows, cols in sizes]}
        if self.kind in ("rank1", "factored"):
            counts["look"] = [-(-rows // 256) * -(-cols // 128) for rows, cols in sizes]
        if self.kind == "factored":
            counts["mean"] = [-(-rows // 128) - (-cols // 128) for rows, cols in sizes]
        return {name: programs(tuple(each), self.device) for name, each in counts.items()}

    def _like(self) -> tuple[Tensor, Tensor]:
        return self.entries[0].param, self.entries[0].grad

    def look(self) -> None:
        """Pass 1: rank-1's maxima, or factored's partial sums of squares; nothing for others."""
        if self.kind not in ("rank1", "factored"):
            return
        look = self._programs["look"]
        kernels._look_kernel[(len(look),)](
            look,
            self._table,
            self._hyper,
            *self._like(),
            **self._form,
            num_warps=kernels.LOOK_WARPS,
        )
        if self.kind == "rank1":
            _join_maxima(self.entries, self.sides)

    def sums(self) -> list[dict[str, Tensor]]:
        """What pass 1 found, by entry: `scale` (maxima), or `row` and `col` (sums of squares)."""
        if self.kind == "rank1":
            return [{"scale": side["scale"]} for side in self.sides]
        return [
            {
                "row": side["row_new"].view(-1, rows).sum(0),
                "col": side["col_new"].view(-1, cols).sum(0),
            }
            for side, (rows, cols) in zip(self.sides, map(_matrix, self.entries), strict=True)
        ]

    def settle(self, whole: Sequence[dict[str, Tensor]] | None = None) -> None:
        """Between the passes: scales and their reciprocals, or new factors and ratios of rows.

        Args:
            whole: Of tensors split over processes: `scale` of the whole, or the new factors'
                `mean`, which the entries hold already.
        """
        if self.kind == "rank1":
            _settle_rank1(self.entries, self.sides, [] if whole is None else whole)
        elif whole is not None:
            for entry, side, found in zip(self.entries, self.sides, whole, strict=True):
                row, mean = entry.second["row"], found["mean"]
                side["row_inv"].copy_((row / mean).masked_fill(mean == 0, 0.0))
        elif self.kind == "factored":
            mean = self._programs["mean"]
            kernels._mean_kernel[(len(mean),)](mean, self._table, self._hyper)
            kernels._ratio_kernel[(len(self.entries),)](self._table)

    def update(self) -> None:
        """Pass 2: decode, step, encode."""
        update = self._programs["update"]
        kernels._update_kernel[(len(update),)](
            update, self._table, self._hyper, *self._like(), **self._form
        )
        if self.kind == "rank1":
            scales = [entry.second["scale"] for entry in self.entries]
            torch._foreach_copy_(scales, [side["scale"] for side in self.sides])
        self.entries = []  # a launch that is kept holds no gradients


@lru_cache(maxsize=32)
def programs(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The block table: which tensor, and which chunk of it, each program works on.

    Args:
        counts: Chunks of each tensor.
        device: Where the kernel runs.

    Returns:
        int32, [sum(counts), 2].

    Example:
        >>> programs((1, 2), torch.device("cpu")).tolist()
        [[0, 0], [1, 0], [1, 1]]
    """
    each = torch.tensor(counts)
    tensor = torch.repeat_interleave(torch.arange(len(counts)), each)
    chunk = torch.arange(len(tensor)) - (each.cumsum(0) - each)[tensor]
    return torch.stack([tensor, chunk], dim=1).int().to(device)


def _matrix(entry: Entry) -> tuple[int, int]:
    shape = entry.param.shape
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def _rank1_sides(entries: list[Entry]) -> list[dict[str, Tensor]]:
    """Vectors of rows and columns for the two passes; the new maxima start at zero."""
    device = entries[0].param.device
    sizes = [n for entry in entries for n in _matrix(entry)]
    new = torch.zeros(sum(sizes), device=device).split(sizes)
    inv = torch.empty(sum(sizes), device=device).split(sizes)
    sides = []
    for i, entry in enumerate(entries):
        shape, scale = entry.param.shape, entry.second["scale"]
        cols = scale[shape[0] :] if len(shape) == 2 else rank1.columns(scale, shape)
        vectors = {"row_old": scale[: shape[0]], "col_old": cols}
        vectors |= {"row_inv": inv[2 * i], "col_inv": inv[2 * i + 1]}
        sides.append(vectors | {"row_new": new[2 * i], "col_new": new[2 * i + 1]})
    return sides


def _join_maxima(entries: list[Entry], sides: list[dict[str, Tensor]]) -> None:
    """The maxima of every dimension from those of rows and flattened columns."""
    for entry, side in zip(entries, sides, strict=True):
        shape, col_new = entry.param.shape, side["col_new"]
        cols = col_new if len(shape) == 2 else rank1.maxima(col_new.view(shape[1:]))
        side["scale"] = torch.cat([side["row_new"], cols])


def _settle_rank1(
    entries: list[Entry], sides: list[dict[str, Tensor]], whole: Sequence[dict[str, Tensor]]
) -> None:
    """The reciprocals of the new scales."""
    inverses: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, (entry, side) in enumerate(zip(entries, sides, strict=True)):
        if whole:
            side["scale"] = whole[i]["scale"]
        shape, scale = entry.param.shape, side["scale"]
        inverses[0].extend((side["row_inv"], side["col_inv"]))
        inverses[1].extend((scale[: shape[0]], rank1.columns(scale, shape)))
    # One vector for all tensors: three launches instead of three for each.
    flat = rank1.inverse(torch.cat(inverses[1]))
    torch._foreach_copy_(inverses[0], list(flat.split([t.numel() for t in inverses[1]])))


def _factored_sides(entries: list[Entry]) -> list[dict[str, Tensor]]:
    """Partial sums, and the ratios of rows, for the factored form; nothing for the others."""
    sides = []
    for entry in entries:
        if entry.kind != "factored":
            sides.append({})
            continue
        rows, cols = _matrix(entry)
        like = entry.second["row"]
        parts = {"row_new": -(-cols // 128) * rows, "col_new": -(-rows // 256) * cols}
        sizes = {**parts, "row_inv": rows}
        sides.append({name: like.new_empty(size) for name, size in sizes.items()})
    return sides


def _table(entries: list[Entry], sides: list[dict[str, Tensor]]) -> Tensor:
    """int64 [n, 21]: see `_FIELD_NAMES` in `adamw_triton.py`."""
    device = entries[0].param.device
    rows = []
    for entry, side in zip(entries, sides, strict=True):
        first, second = payload_parts(entry.kind)
        values = {"p": entry.param.data_ptr(), "g": entry.grad.data_ptr()}
        for fields, payload, names in (
            (("m", "m_scale"), entry.first, first),
            (("v", "v_scale"), entry.second, second),
        ):
            for field, name in zip(fields, names, strict=False):
                values[field] = payload[name].data_ptr()
        values["m_table"] = block.table(entry.first_map, True, device).data_ptr()
        values["v_table"] = block.table(entry.second_map, False, device).data_ptr()
        values |= {name: tensor.data_ptr() for name, tensor in side.items()}
        values["n"] = entry.param.numel()
        values["rows"], values["cols"] = _matrix(entry)
        names = ("correction", "kept", "tick", "seed")
        values |= zip(names, entry.beside.device_fields(), strict=True)
        rows.append([values.get(name, 0) for name in kernels._FIELD_NAMES])
    return torch.tensor(rows, dtype=torch.int64)
