"""Payloads of sharded parameters as checkpoints hold them: row by row, so that rows may move.

Each row of dimension 0 has its own codes and scales, so that rows may be split in another way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Packed
from memtrain.compressors.codebook import Block, RowBlock
from memtrain.kernels.codebook.lloyd_max import BITS, BLOCK
from memtrain.kernels.codebook.quantize import encode
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.packing import bits as bitpack
from memtrain.optim.states.shards import is_sharded, local, own_rows, sharded_like, splits_rows_only

FORMS = (
    {"codes", "scale"},
    {"codes", "row", "col"},
    {"row", "col"},
    {"codes", "scale", "row", "col"},
)
"""Names of the parts: of blocks, rank-1, factored, Lloyd-Max."""


def can_be_rows(compressor: Compressor, param: Tensor) -> bool:
    """Whether a payload of a sharded parameter can be laid out by rows."""
    if (
        isinstance(compressor, Block)
        and compressor.for_rows(param.shape[1:].numel())[0] != compressor
    ):
        return False  # its blocks run on over the rows of a parameter that each process has whole
    return splits_rows_only(param) and bool(compressor.by_rows)


def is_rows(value: Any) -> bool:
    """Whether a checkpoint's value is laid out by rows; a plain factored payload is either."""
    if not isinstance(value, dict) or set(value) not in FORMS:
        return False
    return set(value) != FORMS[0] or value["scale"].dim() == 2


def only_rows(value: dict[str, Tensor]) -> bool:
    """Whether no live payload has these parts, or not of this form."""
    if "scale" in value:  # of a live payload: one a block, not some a row
        return value["scale"].dim() == 2
    return "codes" in value


def to_rows(compressor: Compressor, payload: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """A live payload, row by row, as DTensors that are split as the parameter is.

    Args:
        compressor: The payload's; `can_be_rows`.
        payload: This process's.
        param: A sharded parameter.

    Returns:
        Blocks: `codes` uint8 [rows, blocks of a row, bytes] and `scale` float32 [rows, blocks of a
        row]. Rank-1: `codes` uint8 [rows, bytes], `row` float32 [rows], and `col` float32
        [sum(shape[1:])]. Factored: `row`, `col` float32 [columns]. Lloyd-Max: these, `codes`, and
        `scale` bfloat16 [rows, blocks of a row]. All are DTensors but `col`, of which each process
        holds the same.

    Memory:
        A byte or two per element for the time of the call; nothing lasting but the result.
    """
    rows, cols = _size(local(param).shape)
    wrap = _wrapper(param)
    if compressor.by_rows == "factored":
        given = {"row": payload["row"]}
    elif compressor.by_rows == "lloyd_max":
        given = {"codes": payload["codes"].view(_lloyd_max(rows, cols)["codes"])}
        given |= {"scale": payload["scale"].view(rows, cols // BLOCK), "row": payload["row"]}
    elif compressor.by_rows == "rank1":
        codes = _codes_to_rows(payload["codes"], compressor.bits, rows, cols)  # pyright: ignore[reportAttributeAccessIssue]
        scale = payload["scale"]
        given, payload = {"codes": codes, "row": scale[:rows]}, {"col": scale[rows:]}
    else:
        sizes = _blocks_of(compressor, rows, cols)
        return {name: wrap(payload[name].view(size)) for name, size in sizes.items()}
    return {**{name: wrap(x) for name, x in given.items()}, "col": payload["col"].clone()}


def from_rows(
    compressor: Compressor, saved: dict[str, Tensor], param: Tensor
) -> dict[str, Tensor] | Tensor:
    """The live payload of this process's rows, bit for bit.

    Blocks of a parameter that is not split run on over its rows: there values are decoded, to be
    quantised again, which moves each by at most one quantisation step.

    Args:
        compressor: Of the state.
        saved: As `to_rows` made it, or whole plain tensors of the same names.
        param: Sharded or not.

    Returns:
        A payload, or decoded values of the part's shape.

    Raises:
        ValueError: If the checkpoint is of another compressor or shape.
    """
    part = local(param)
    rows, cols = _size(part.shape)
    if compressor.by_rows == "lloyd_max" and not only_rows(saved):  # the whole's, as it lives
        whole = _lloyd_max(param.shape[0], cols)
        saved = {name: value.reshape(whole[name]) for name, value in saved.items()}
    mine = {name: value if name == "col" else _own(value, param) for name, value in saved.items()}
    if compressor.by_rows == "factored":
        _check(compressor, part, mine, {"row": (rows,), "col": (cols,)})
        return {name: t.clone() for name, t in mine.items()}
    if compressor.by_rows == "lloyd_max":
        _check(compressor, part, mine, _lloyd_max(rows, cols))
        blocks = rows * cols // BLOCK
        live = {"codes": (blocks, BLOCK * BITS // 8), "scale": (blocks,)}
        return {name: x.reshape(live.get(name, x.shape)).clone() for name, x in mine.items()}
    if compressor.by_rows == "rank1":
        bits: int = compressor.bits  # pyright: ignore[reportAttributeAccessIssue]
        sizes = {
            "codes": (rows, -(-cols // 8) * bits),
            "row": (rows,),
            "col": (sum(part.shape[1:]),),
        }
        _check(compressor, part, mine, sizes)
        codes = _codes_from_rows(mine["codes"], compressor, cols)
        return {"codes": codes, "scale": torch.cat([mine["row"], mine["col"]])}
    theirs = compressor.for_rows(cols)[0]
    if not isinstance(theirs, Block):
        raise ValueError(f"a state laid out by rows of {cols} elements does not fit {compressor}")
    sizes = _blocks_of(theirs, rows, cols)
    _check(compressor, part, mine, sizes)
    count, size = rows * sizes["scale"][1], sizes["codes"][2]
    payload = {"codes": mine["codes"].reshape(count, size), "scale": mine["scale"].reshape(count)}
    if compressor == theirs:
        return {name: x.clone() for name, x in payload.items()}
    return theirs.decompress(Packed(payload, part.shape, torch.float32))


def _blocks_of(compressor: Any, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    """The sizes of blocks by rows, which begin anew in each row."""
    size = compressor.size if isinstance(compressor, RowBlock) else compressor.block_size
    blocks = -(-cols // size)
    return {"codes": (rows, blocks, size * compressor.bits // 8), "scale": (rows, blocks)}


def _lloyd_max(rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    """The sizes of a Lloyd-Max payload by rows, which fill whole blocks."""
    codes, scale = (rows, cols * BITS // 8), (rows, cols // BLOCK)
    return {"codes": codes, "scale": scale, "row": (rows,), "col": (cols,)}


def _size(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if shape else (1, 1)


def _wrapper(param: Tensor) -> Callable[[Tensor], Tensor]:
    rows = param.shape[0] if param.dim() else 1

    def wrap(x: Tensor) -> Tensor:
        return sharded_like(x.contiguous().clone(), param, torch.Size([rows, *x.shape[1:]]))

    return wrap


def _own(value: Tensor, param: Tensor) -> Tensor:
    """This process's rows of a DTensor, or of a whole tensor."""
    if is_sharded(value):
        return local(value)
    first, count = own_rows(param)
    return value[first : first + count]


def _codes_to_rows(codes: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    flat = bitpack.unpack(codes, bits).to(torch.uint8).view(-1)[: rows * cols]
    return bitpack.pack(torch.nn.functional.pad(flat.view(rows, cols), (0, -cols % 8)), bits)


def _codes_from_rows(codes: Tensor, compressor: Any, cols: int) -> Tensor:
    """Rank-1's blocks of 128 codes; what is missing in the last one has the code of 0."""
    codes = bitpack.unpack(codes, compressor.bits)[:, :cols]
    blocks = bitpack.blocks(codes, 128)
    if missing := blocks.numel() - codes.numel():
        zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        book = Codebook(compressor.map, compressor.bits, compressor.signed)
        blocks[-1, -missing:] = encode(zero, one, book).item()
    return bitpack.pack(blocks, compressor.bits)


def _check(
    compressor: Compressor,
    part: Tensor,
    mine: dict[str, Tensor],
    wanted: dict[str, tuple[int, ...]],
) -> None:
    found = {name: tuple(value.shape) for name, value in mine.items()}
    if found != wanted:
        raise ValueError(
            f"a state of a part of shape {tuple(part.shape)} holds {found}, but {compressor} "
            f"needs {wanted}"
        )
