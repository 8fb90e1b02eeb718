"""Payloads of sharded parameters in checkpoints.

Each row of dimension 0 has its own codes and scales, so that rows may be split in another way.
"""

from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Packed
from memtrain.compressors.codebook import Block
from memtrain.kernels.codebook.lloyd_max import BITS, BLOCK
from memtrain.kernels.codebook.quantize import quantize_scaled
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.packing import bits as bitpack
from memtrain.optim.states.shards import (
    is_sharded,
    local,
    local_rows,
    sharded_like,
    splits_rows_only,
)

PARTS = (
    {"codes", "scale"},
    {"codes", "row", "col"},
    {"row", "col"},
    {"codes", "scale", "row", "col"},
)
"""Names of the tensors: of blocks, rank-1, factored, Lloyd-Max."""


def can_be_rows(compressor: Compressor, param: Tensor) -> bool:
    """Whether a payload of a sharded parameter can be laid out by rows."""
    if (
        isinstance(compressor, Block)
        and compressor.for_rows(param.shape[1:].numel())[0] != compressor
    ):
        return False  # blocks of a replicated parameter cross rows
    return splits_rows_only(param) and bool(compressor.by_rows)


def is_rows(value: Any) -> bool:
    """Whether a checkpoint's value is laid out by rows; a factored payload always is."""
    if not isinstance(value, dict) or set(value) not in PARTS:
        return False
    return set(value) != PARTS[0] or value["scale"].dim() == 2


def only_rows(value: dict[str, Tensor]) -> bool:
    """Whether a value laid out by rows differs from every payload in memory."""
    if "scale" in value:  # in memory one per block, in a checkpoint several per row
        return value["scale"].dim() == 2
    return "codes" in value


def to_rows(compressor: Compressor, payload: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """Lay out this process's payload row by row, in DTensors that are split as the parameter is.

    Blocks: `codes` uint8 [rows, blocks per row, bytes] and `scale` float32 [rows, blocks per row].
    Rank-1: `codes` uint8 [rows, bytes], `row` float32 [rows], and `col` float32 [sum(shape[1:])].
    Factored: `row`, `col` float32 [columns]. Lloyd-Max: these, `codes`, and `scale` bfloat16 [rows,
    blocks per row]. All are DTensors except `col`, which is equal on all processes.
    """
    sizes, whole = _sizes(compressor, local(param).shape), param.shape[:1] or (1,)
    if compressor.by_rows == "rank1":
        rows, cols = _matrix(local(param).shape)
        codes = bitpack.unpack(payload["codes"], compressor.bits).to(torch.uint8)
        codes = codes.view(-1)[: rows * cols].view(rows, cols)
        codes = bitpack.pack(torch.nn.functional.pad(codes, (0, -cols % 8)), compressor.bits)
        payload = {"codes": codes, "row": payload["scale"][:rows], "col": payload["scale"][rows:]}
    found = {name: payload[name].reshape(size).clone() for name, size in sizes.items()}
    return {
        name: x if name == "col" else sharded_like(x, param, torch.Size([*whole, *x.shape[1:]]))
        for name, x in found.items()
    }


def from_rows(
    compressor: Compressor, saved: dict[str, Tensor], param: Tensor
) -> dict[str, Tensor] | Tensor:
    """Return the payload of this process's rows, bit for bit.

    `saved` is a result of `to_rows`, or whole tensors of the same names. Blocks of a parameter that
    is not split cross rows: such values are returned decoded. Quantizing them again moves each by
    at most one quantization step.
    """
    part = local(param)
    cols = _matrix(part.shape)[1]
    per_row: Any = compressor.for_rows(cols)[0] if compressor.by_rows == "block" else compressor
    if not per_row.by_rows:
        raise ValueError(f"a state laid out by rows of {cols} elements does not fit {compressor}")
    if per_row.by_rows == "lloyd_max" and not only_rows(saved):  # as in memory, of all rows
        sizes = _sizes(per_row, param.shape)
        saved = {name: value.reshape(sizes[name]) for name, value in saved.items()}
    parts = {k: x if k == "col" else _local_rows(x, param) for k, x in saved.items()}
    wanted, found = _sizes(per_row, part.shape), {name: tuple(x.shape) for name, x in parts.items()}
    if found != wanted:
        raise ValueError(
            f"a state of a part of shape {tuple(part.shape)} holds {found}, but {compressor} "
            f"needs {wanted}"
        )
    if per_row.by_rows == "factored":
        return {name: x.clone() for name, x in parts.items()}
    if per_row.by_rows == "rank1":
        codes = _rank1_codes(parts["codes"], per_row, cols)
        return {"codes": codes, "scale": torch.cat([parts["row"], parts["col"]])}
    width = BLOCK * BITS // 8 if per_row.by_rows == "lloyd_max" else wanted["codes"][2]
    sizes = {"codes": (parts["codes"].numel() // width, width), "scale": (parts["scale"].numel(),)}
    payload = {name: x.reshape(sizes.get(name, x.shape)).clone() for name, x in parts.items()}
    if compressor == per_row:
        return payload
    return per_row.decompress(Packed(payload, part.shape, torch.float32))


def _sizes(compressor: Any, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """The sizes of a payload of this shape by rows."""
    rows, cols = _matrix(shape)
    if isinstance(compressor, Block):
        blocks = -(-cols // compressor.size)
        codes = (rows, blocks, compressor.size * compressor.bits // 8)
        return {"codes": codes, "scale": (rows, blocks)}
    vectors = {"row": (rows,), "col": (cols,)}
    if compressor.by_rows == "rank1":
        codes = {"codes": (rows, -(-cols // 8) * compressor.bits)}
        return {**codes, "row": (rows,), "col": (sum(shape[1:]),)}
    if compressor.by_rows == "lloyd_max":
        return {"codes": (rows, cols * BITS // 8), "scale": (rows, cols // BLOCK), **vectors}
    return vectors


def _matrix(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if shape else (1, 1)


def _local_rows(value: Tensor, param: Tensor) -> Tensor:
    """This process's rows of a DTensor, or of a whole tensor."""
    if is_sharded(value):
        return local(value)
    first, count = local_rows(param)
    return value[first : first + count]


def _rank1_codes(codes: Tensor, compressor: Any, cols: int) -> Tensor:
    """Rank-1's blocks of 128 codes; the last one is filled with the code of 0."""
    book = Codebook(compressor.map, compressor.bits, compressor.signed)
    codes = bitpack.unpack(codes, book.bits)[:, :cols]
    blocks = bitpack.blocks(codes, 128)
    if missing := blocks.numel() - codes.numel():
        zeros = quantize_scaled(codes.new_zeros(1, dtype=torch.float32), book)
        blocks[-1, -missing:] = bitpack.unpack(zeros, book.bits)[0, :missing]
    return bitpack.pack(blocks, book.bits)
