"""Payloads of sharded parameters as checkpoints hold them: row by row, so that rows may move.

Each row of dimension 0 has its own codes, and the scales of the blocks that it touches: any other
split of the rows finds all it needs. Blocks that begin anew in each row move as they are. What 0.1
wrote had blocks that ran on over rows, and began anew in each part: they are read too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Packed
from memtrain.compressors.codebook import RowBlock
from memtrain.kernels.codebook.lloyd_max import BITS, BLOCK
from memtrain.kernels.codebook.quantize import encode
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.packing import bits as bitpack
from memtrain.optim.states.shards import is_sharded, local, own_rows, sharded_like, splits_rows_only

FORMS = (
    {"codes", "scale", "start"}, {"codes", "row", "col"}, {"row", "col"},
    {"codes", "scale", "row", "col"},
)  # fmt: skip
"""Names of the parts: of blocks, rank-1, factored, Lloyd-Max."""
OWN_BLOCKS = -1
"""The start of a row that shares no block with another."""


def can_be_rows(compressor: Compressor, param: Tensor) -> bool:
    """Whether a payload of a sharded parameter can be laid out by rows."""
    return splits_rows_only(param) and bool(compressor.by_rows)


def is_rows(value: Any) -> bool:
    """Whether a checkpoint's value is laid out by rows; a plain factored payload is either."""
    return isinstance(value, dict) and set(value) in FORMS


def only_rows(value: dict[str, Tensor]) -> bool:
    """Whether no live payload has these parts, or not of this form."""
    if "scale" in value:  # of a live Lloyd-Max payload: one a block, not some a row
        return "row" not in value or value["scale"].dim() == 2
    return "codes" in value


def to_rows(compressor: Compressor, payload: dict[str, Tensor], param: Tensor) -> dict[str, Tensor]:
    """A live payload, row by row, as DTensors that are split as the parameter is.

    Args:
        compressor: The payload's; `can_be_rows`.
        payload: This process's.
        param: A sharded parameter.

    Returns:
        Blocks: `codes` uint8 [rows, bytes], `scale` float32 [rows, blocks a row may touch], `start`
        int32 [rows] (each row's place in its first block, or `OWN_BLOCKS`). Rank-1: `codes`, `row`
        float32 [rows], and `col` float32 [sum(shape[1:])]. Factored: `row`, `col` float32
        [columns]. Lloyd-Max: these, `codes`, and `scale` bfloat16 [rows, blocks of a row]. All are
        DTensors but `col`, of which each process holds the same.

    Memory:
        A byte or two per element for the time of the call; nothing lasting but the result.
    """
    part = local(param)
    rows, cols = _size(part.shape)
    wrap = _wrapper(param)
    if compressor.by_rows == "factored":
        return {"row": wrap(payload["row"]), "col": payload["col"].clone()}
    scale = payload["scale"]
    if compressor.by_rows == "lloyd_max":
        given = {"codes": payload["codes"].view(_lloyd_max(rows, cols)["codes"])}
        given |= {"scale": scale.view(rows, cols // BLOCK), "row": payload["row"]}
        return {**{name: wrap(x) for name, x in given.items()}, "col": payload["col"].clone()}
    if isinstance(compressor, RowBlock):
        width = (rows, compressor.blocks * compressor.size)
        unpacked = bitpack.unpack(payload["codes"], compressor.bits).to(torch.uint8).view(width)
        own = _padded_codes(unpacked[:, :cols], compressor.bits)
        start = torch.full((rows,), OWN_BLOCKS, dtype=torch.int32, device=scale.device)
        scales = scale.view(rows, compressor.blocks)
        return {"codes": wrap(own), "scale": wrap(scales), "start": wrap(start)}
    codes = {"codes": wrap(_codes_to_rows(payload["codes"], compressor.bits, rows, cols))}  # pyright: ignore[reportAttributeAccessIssue]
    if compressor.by_rows == "rank1":
        return {**codes, "row": wrap(scale[:rows]), "col": scale[rows:].clone()}
    size = compressor.block_size  # pyright: ignore[reportAttributeAccessIssue]
    start, block, used = _touched(rows, cols, size, scale.device)
    spread = torch.where(used, scale[block.clamp(max=max(0, len(scale) - 1))], 0.0)
    return {**codes, "scale": wrap(spread), "start": wrap(start)}


def from_rows(
    compressor: Compressor, saved: dict[str, Tensor], param: Tensor
) -> dict[str, Tensor] | Tensor:
    """The live payload of this process's rows.

    Where the blocks of the checkpoint begin elsewhere (the parameter was not split, or 0.1 wrote
    it, and rows do not fill whole blocks), values are decoded and quantised again: each moves by
    at most one quantisation step. All else comes back bit for bit.

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
    if not compressor.by_rows:
        raise ValueError(f"a state laid out by rows does not fit {compressor}")
    wanted: dict[str, tuple[int, ...]] = {"codes": (rows, _row_bytes(cols, compressor.bits))}
    if compressor.by_rows == "rank1":
        _check(compressor, part, mine, {**wanted, "row": (rows,), "col": (sum(part.shape[1:]),)})
        codes, scale = (
            _unpack(mine["codes"], compressor.bits, cols),
            torch.ones(1, dtype=torch.float32, device=part.device),
        )
        return {"codes": _blocks(codes, 128, compressor, scale), "scale": _join(mine)}
    if not rows:  # whatever blocks the other processes' rows have
        return torch.zeros(part.shape, dtype=torch.float32, device=part.device)
    if "start" in mine and bool((mine["start"] == OWN_BLOCKS).any()):
        return _own_blocks(compressor, part, mine, wanted)
    size = compressor.block_size  # pyright: ignore[reportAttributeAccessIssue]
    start, block, used = _touched(rows, cols, size, part.device)
    _check(compressor, part, mine, {**wanted, "scale": tuple(block.shape), "start": (rows,)})
    codes = _unpack(mine["codes"], compressor.bits, cols)
    if torch.equal(mine["start"], start) and not isinstance(compressor, RowBlock):
        scale = mine["scale"].new_zeros(-(-part.numel() // size))
        scale[block[used]] = mine["scale"][used]
        return {"codes": _blocks(codes, size, compressor, scale), "scale": scale}
    at = (mine["start"].long().unsqueeze(1) + torch.arange(cols, device=part.device)) // size
    values = _codebook(compressor).values(part.device)[codes]
    return (values * mine["scale"].gather(1, at)).view(part.shape)


def _lloyd_max(rows: int, cols: int) -> dict[str, tuple[int, ...]]:
    """The sizes of a Lloyd-Max payload by rows, which fill whole blocks."""
    codes, scale = (rows, cols * BITS // 8), (rows, cols // BLOCK)
    return {"codes": codes, "scale": scale, "row": (rows,), "col": (cols,)}


def _own_blocks(
    compressor: Compressor,
    part: Tensor,
    mine: dict[str, Tensor],
    wanted: dict[str, tuple[int, ...]],
) -> dict[str, Tensor] | Tensor:
    """The payload of rows with blocks of their own; of another compressor the decoded values."""
    rows, cols = _size(part.shape)
    theirs = compressor.for_rows(cols)[0]
    if not isinstance(theirs, RowBlock):
        raise ValueError(
            f"rows of {cols} elements with blocks of their own do not fit {compressor}"
        )
    sizes = {**wanted, "scale": (rows, theirs.blocks), "start": (rows,)}
    _check(compressor, part, mine, sizes)
    codes = _unpack(mine["codes"], theirs.bits, cols)
    scale = mine["scale"].reshape(-1)
    last = mine["scale"][:, -1:].contiguous()
    zero = encode(torch.zeros_like(last), last, _codebook(theirs))  # as padding lives
    whole = torch.cat([codes, zero.expand(-1, theirs.blocks * theirs.size - cols)], 1)
    payload = {"codes": bitpack.pack(whole.view(-1, theirs.size), theirs.bits), "scale": scale}
    if compressor == theirs:
        return payload
    return theirs.decompress(Packed(payload, part.shape, torch.float32))


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


def _row_bytes(cols: int, bits: int) -> int:
    return -(-cols // 8) * bits


def _codes_to_rows(codes: Tensor, bits: int, rows: int, cols: int) -> Tensor:
    flat = bitpack.unpack(codes, bits).to(torch.uint8).view(-1)[: rows * cols]
    return _padded_codes(flat.view(rows, cols), bits)


def _padded_codes(codes: Tensor, bits: int) -> Tensor:
    return bitpack.pack(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)), bits)


def _unpack(codes: Tensor, bits: int, cols: int) -> Tensor:
    return bitpack.unpack(codes, bits)[:, :cols]


def _blocks(codes: Tensor, size: int, compressor: Any, scale: Tensor) -> Tensor:
    """Whole blocks of codes; what is missing in the last one has the code of 0, as it lives."""
    blocks = bitpack.blocks(codes, size)
    if missing := blocks.numel() - codes.numel():
        zero = torch.zeros(1, 1, dtype=torch.float32, device=codes.device)
        last = scale[-1:].view(1, 1).to(codes.device)
        blocks[-1, -missing:] = encode(zero, last, _codebook(compressor)).item()
    return bitpack.pack(blocks, compressor.bits)


def _codebook(compressor: Any) -> Codebook:
    return Codebook(compressor.map, compressor.bits, compressor.signed)


def _join(mine: dict[str, Tensor]) -> Tensor:
    return torch.cat([mine["row"], mine["col"]])


def _touched(
    rows: int, cols: int, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's place in its first block, the blocks that it may touch, and whether it does."""
    first = torch.arange(rows, device=device) * cols
    block = (first // size).unsqueeze(1) + torch.arange(
        (cols + size - 2) // size + 1, device=device
    )
    last = (first + cols - 1) // size
    return (first % size).int(), block, block <= last.unsqueeze(1)


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
