"""The AdamW step over many tensors at once, with its moments kept in 4 bits."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.codebook import block as codebook
from memtrain.kernels.codebook import rank1
from memtrain.kernels.dispatch import choose
from memtrain.kernels.step import entries, scalars
from memtrain.kernels.step.cuda_graph import Kept
from memtrain.kernels.step.entries import FLOAT_TYPES
from memtrain.kernels.step.scalars import Hyper
from memtrain.kernels.step.shard import Shard
from memtrain.kernels.step.split import PLAIN, Beside

KINDS = ("exact", "block", "rank1", "factored")
BLOCK = 128
PIECEWISE = "factored8"  # which `adamw_pieces` steps
FACTORED = ("factored", PIECEWISE)
FIRST = {PIECEWISE: (8, 256)}
"""Bits and block size of the first moment, where they are not 4 and 128."""
_FIELDS, _MAX_DIMS = 28, 8


class Entry(NamedTuple):
    """One parameter's part of a step; the payloads and the parameter are written in place.

    `kind` names the form of the moments: `"exact"` (both payloads `{"tensor": float32}`), or a
    first moment in signed blocks of 128 (`{"codes", "scale"}`) with a second moment in unsigned
    blocks of 128 (`"block"`), rank-1 (`"rank1"`, at least 2 dimensions) or factored
    (`"factored"`, `{"row", "col"}`, at least 2 dimensions). The maps are of `codebook.MAPS`.
    `"factored8"` is `"factored"` with a first moment of 8 bits in blocks of 256.
    `hyper` is on the host, or a row of `numbers.on_device`. With a `shard` everything is a
    process's part, but for what rank-1 and factored know of the whole: see `adamw_sharded.step`.
    `beside` is what a bfloat16 or float16 parameter has besides itself.
    """

    param: Tensor
    grad: Tensor
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    kind: str
    hyper: Hyper | Tensor
    first_map: str = "DE"
    second_map: str = "Linear"
    shard: Shard | None = None
    beside: Beside = PLAIN


def adamw_step(given: Sequence[Entry], kept: Kept | None = None) -> None:
    """Decompress both moments, take one AdamW step, compress them again: for all entries.

    The step uses the new moments before they are quantised (factored: the new second moment as
    its factors give it), in float32, and rounds the new parameter once, to the nearest value of its
    dtype. One C++ call (CPU), or one launch a pass for each pair of dtypes (CUDA), serves all
    contiguous parameters of float32, bfloat16 and float16 with gradients of any of these; other
    layouts and float64 take the reference's arithmetic, one parameter at a time. A gradient
    whose strides differ from its parameter's is copied first.
    NaN and Inf in a gradient reach the parameter as in torch's AdamW, and stay in the moments of
    the element's block of 128 (first moment, block second moment), of the element alone (rank-1,
    as `rank1.quantize` says), or of the whole tensor (factored).

    Args:
        given: What to update. Parameters without elements are skipped.
        kept: Of steps that a CUDA graph may capture; their numbers are on the device.

    Memory:
        No parameter-sized temporaries in the C++ and Triton forms; rank-1 and factored hold
        vectors of rows and columns (and 1/64 of a float32 gradient, factored) for the call.

    Raises:
        ValueError: If a kind is unknown or needs more dimensions than the parameter has.

    Example:
        >>> p, g = torch.ones(2), torch.ones(2)
        >>> first, second = {"tensor": torch.zeros(2)}, {"tensor": torch.zeros(2)}
        >>> from memtrain.kernels.step.scalars import hyper
        >>> h = hyper(1, lr=0.5, betas=(0.9, 0.999), eps=0.0)
        >>> adamw_step([Entry(p, g, first, second, "exact", h)])
        >>> p
        tensor([0.5000, 0.5000])

    Reference:
        Li et al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507, algorithm 1.
    """
    for entry in given:
        _check(entry)
    split = [e for e in given if e.shard is not None and e.kind in ("rank1", *FACTORED)]
    pieces = [e for e in given if e.shard is None and e.kind == PIECEWISE]
    whole = [e for e in given if not any(e is other for other in split + pieces)]
    if pieces:
        from memtrain.kernels.step import adamw_pieces

        for entry in entries.gather(pieces, step_reference):
            adamw_pieces.step(entry)
    together = entries.gather(whole, step_reference, fits)
    if split:
        from memtrain.kernels.step import adamw_sharded

        adamw_sharded.step(split, kept)
    if not together:
        return
    if choose(together[0].param) == "cpu":
        # Every tensor of `table`, `alive` must outlive the call: C++ sees only addresses.
        table, alive = _table(together)
        cpu.call("mt_adamw_step", table, len(together))
        del alive
    else:
        from memtrain.kernels.step import adamw_launch

        adamw_launch.step(together, kept)


def _check(entry: Entry) -> None:
    if entry.kind not in (*KINDS, PIECEWISE):
        allowed = ", ".join((*KINDS, PIECEWISE))
        raise ValueError(f"kind {entry.kind!r} is unknown; allowed: {allowed}")
    if entry.kind in ("rank1", *FACTORED) and entry.param.dim() < 2:
        shape = tuple(entry.param.shape)
        raise ValueError(f"kind {entry.kind!r} needs at least 2 dimensions, got shape {shape}")
    first, second = _sizes(entry.kind, entry.param.shape)
    entries.check_sizes(entry, [(entry.first, first), (entry.second, second)])


def _sizes(kind: str, shape: torch.Size) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of what both moments keep."""
    n = shape.numel()
    if kind == "exact":
        return {"tensor": n}, {"tensor": n}
    bits, size = FIRST.get(kind, (4, BLOCK))
    n_blocks = -(-n // size)
    codes = {"codes": n_blocks * size * bits // 8}
    block = {**codes, "scale": n_blocks}
    if kind == "rank1":
        return block, {**codes, "scale": sum(shape)}
    if kind in FACTORED:
        return block, {"row": shape[0], "col": shape[1:].numel()}
    return block, block


def fits(entry: Entry) -> bool:
    """Whether the kernels serve an entry, but for the strides of its gradient."""
    return entry.param.dim() <= _MAX_DIMS and entries.fits(entry)


def step_reference(entry: Entry) -> None:
    """One entry of `adamw_step` in pure torch."""
    new, h = entries.read(entry), scalars.known(Hyper, entry.hyper)
    work = new.dtype
    g = entry.grad.to(work) * h.sign
    g = scalars.where(h.l2, lambda: g + h.l2 * new, g)
    m = decode_first(entry).to(work)
    m = m + h.w1 * (g - m)
    v = _next_second(entry, h, g)
    new = new * h.decay - (h.step_size * m) / (v.sqrt() + h.eps)
    entries.write(entry, new)
    _store(entry, m, v)


def decode_first(entry: Entry) -> Tensor:
    """The first moment as it is kept, of the parameter's shape."""
    if entry.kind == "exact":
        return entry.first["tensor"]
    codes, scale = entry.first["codes"], entry.first["scale"]
    bits, _ = FIRST.get(entry.kind, (4, BLOCK))
    flat = codebook.dequantize_reference(
        codes, scale, entry.first_map, bits, True, entry.param.numel()
    )
    return flat.view(entry.param.shape)


def _next_second(entry: Entry, h: Hyper, g: Tensor) -> Tensor:
    """The new second moment; the factored form is updated here, since it never holds `v`."""
    shape = entry.param.shape
    if entry.kind in FACTORED:
        square = (g * g).float().reshape(shape[0], -1)
        row, col = entry.second["row"], entry.second["col"]
        row.copy_(h.b2 * row + h.w2 * square.mean(1))
        col.copy_(h.b2 * col + h.w2 * square.mean(0))
        mean = row.mean()
        ratio = (row / mean).masked_fill(mean == 0, 0.0)
        return (ratio.unsqueeze(1) * col).view(shape).to(g.dtype)
    if entry.kind == "exact":
        v = entry.second["tensor"]
    else:
        codes, scale = entry.second["codes"], entry.second["scale"]
        if entry.kind == "rank1":
            v = rank1.dequantize_reference(codes, scale, entry.second_map, 4, False, shape)
        else:
            v = codebook.dequantize_reference(
                codes, scale, entry.second_map, 4, False, entry.param.numel()
            ).view(shape)
    return h.b2 * v.to(g.dtype) + (h.w2 * g) * g


def _store(entry: Entry, m: Tensor, v: Tensor) -> None:
    if entry.kind == "exact":
        entry.first["tensor"].copy_(m)
        entry.second["tensor"].copy_(v)
        return
    form = FIRST.get(entry.kind, (4, BLOCK))
    new = codebook.quantize_reference(m, entry.first_map, form[0], True, form[1])
    _write(entry.first, new)
    if entry.kind == "rank1":
        _write(entry.second, rank1.quantize_reference(v, entry.second_map, 4, False))
    elif entry.kind == "block":
        _write(entry.second, codebook.quantize_reference(v, entry.second_map, 4, False, BLOCK))


def _write(payload: Mapping[str, Tensor], new: tuple[Tensor, Tensor]) -> None:
    payload["codes"].copy_(new[0])
    payload["scale"].copy_(new[1])


def payload_parts(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the tensors of the first and of the second payload of a kind."""
    coded = ("codes", "scale")
    if kind == "exact":
        return ("tensor",), ("tensor",)
    return coded, ("row", "col") if kind == "factored" else coded


def _table(given: Sequence[Entry]) -> tuple[Tensor, list[Tensor]]:
    """The C++ kernel's table, int64 [n, 28] (`Row` of cpu/step/adamw.cpp), and what it points to.

    Hyperparameters are rows of one float32 tensor [n, 8].
    """
    device = given[0].param.device
    hypers = scalars.together([entry.hyper for entry in given], device)
    kept = [hypers]
    rows = []
    for i, entry in enumerate(given):
        first, second = payload_parts(entry.kind)
        pointers = [0, 0, 0, 0]
        for k, tensor in enumerate(entry.first[name] for name in first):
            pointers[k] = tensor.data_ptr()
        for k, tensor in enumerate(entry.second[name] for name in second):
            pointers[2 + k] = tensor.data_ptr()
        maps = (
            codebook.table(entry.first_map, True, device).data_ptr(),
            codebook.table(entry.second_map, False, device).data_ptr(),
        )
        shape = list(entry.param.shape)
        row_count = shape[0] if shape else 1
        row = [entry.param.data_ptr(), entry.grad.data_ptr(), *pointers, *maps]
        row += [hypers.data_ptr() + 32 * i, entry.param.numel(), row_count]
        row += [entry.param.numel() // row_count, KINDS.index(entry.kind), len(shape), *shape]
        row += [0] * (_FIELDS - 6 - len(row))
        row += [FLOAT_TYPES[entry.param.dtype], FLOAT_TYPES[entry.grad.dtype]]
        rows.append([*row, *entry.beside.fields()])
    kept += [entry.grad for entry in given]
    return torch.tensor(rows, dtype=torch.int64), kept
