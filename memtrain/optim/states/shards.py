"""Parameters of which each process holds a part (DTensor): their parts, and what is split how."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key
from memtrain.compressors.codebook import seed_of
from memtrain.compressors.factored import Factored
from memtrain.compressors.rank1 import Rank1
from memtrain.kernels.codebook import rank1, row_column
from memtrain.kernels.codebook.codes import Book
from memtrain.kernels.step import shard as shards
from memtrain.kernels.step.shard import Shard


def local(x: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor itself."""
    inner = getattr(x, "_local_tensor", None)
    return x if inner is None else inner


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor."""
    return local(x) is not x


def sharded_like(value: Tensor, param: Tensor, shape: torch.Size | None = None) -> Tensor:
    """`value`, this process's part, as a tensor sharded like `param`; itself if that is not.

    Args:
        value: Of any dtype.
        param: A parameter.
        shape: Of the whole, contiguous; by default the parameter's.

    Returns:
        A DTensor over `value`'s memory.
    """
    if not is_sharded(param):
        return value
    from torch.distributed.tensor import DTensor

    like: Any = param
    stride = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
    whole = like.shape if shape is None else shape
    return DTensor.from_local(value, like.device_mesh, like.placements, shape=whole, stride=stride)


def same_placement(value: Tensor, param: Tensor) -> bool:
    """Whether a state is split over processes as its parameter is."""
    if not is_sharded(param):
        return not is_sharded(value)
    one: Any = value
    other: Any = param
    return is_sharded(value) and tuple(one.placements) == tuple(other.placements)


def local_gradient(param: Tensor) -> Tensor:
    """This process's part of a parameter's gradient, which is known to be there."""
    grad: Any = param.grad if param.grad is not None else torch.zeros_like(param)
    if is_sharded(param) and not same_placement(grad, param):
        like: Any = param
        # The copy waits for the collective: kernels read the memory itself.
        return grad.redistribute(placements=like.placements).to_local().clone()
    return local(grad)


def shard_of(param: Tensor) -> Shard | None:
    """How a parameter is split; None if this process holds all of it."""
    if not is_sharded(param):
        return None
    like: Any = param
    mesh = like.device_mesh
    groups = tuple(
        (placement.dim, mesh.get_group(m))
        for m, placement in enumerate(like.placements)
        if placement.is_shard() and mesh.size(m) > 1
    )
    return Shard(tuple(like.shape), groups) if groups else None


def part_number(param: Tensor) -> int:
    """Which part of a parameter this process holds: equal for replicas, 0 for a whole one."""
    if not is_sharded(param):
        return 0
    like: Any = param
    mesh, number = like.device_mesh, 0
    for m, placement in enumerate(like.placements):
        if placement.is_shard():
            number = number * mesh.size(m) + mesh.get_local_rank(m)
    return number


def pack_part(compressor: Compressor, x: Tensor, key: Key, shard: Shard) -> dict[str, Tensor]:
    """`layout.pack` of a process's part: blocks start anew, rank-1 and factored know the whole.

    Args:
        compressor: Not `Identity`.
        x: The part.
        key: Feeds stochastic rounding; `part_number` is in it.
        shard: The part's place. Each process of its groups must call.

    Returns:
        The payload.
    """
    if x.dim() > 1 and isinstance(compressor, Rank1):
        scale = rank1.maxima(x)
        shards.all_reduce(shards.of_maxima(scale, x.shape, shard), "max")
        book = Book(compressor.map, compressor.bits, compressor.signed)
        seed = seed_of(key, compressor.rounding)
        codes = row_column.quantize(x, rank1.inverses(scale, x.shape), book, seed)
        return {"codes": codes, "scale": scale}
    if isinstance(compressor, Factored) and compressor != Factored() and not shard.by_rows:
        raise ValueError(
            f"{compressor} of a parameter of shape {shard.shape} that is split along dimensions "
            f"{[dim for dim, _ in shard.groups]}; allowed: 0"
        )
    if compressor == Factored():
        matrix = x.float().reshape(x.shape[0], x.shape[1:].numel())
        row, col = matrix.sum(1), matrix.sum(0)
        shards.all_reduce([*shards.of_rows(row, shard), *shards.of_columns(col, shard)], "sum")
        whole = torch.Size(shard.shape)
        return {"row": row / max(1, whole[1:].numel()), "col": col / max(1, whole[0])}
    return dict(compressor.compress(x, key=key).tensors)


def unpack_factored(payload: dict[str, Tensor], shape: torch.Size, shard: Shard) -> Tensor:
    """A part of a factored tensor: its factors' mean is that of the whole.

    Args:
        payload: `row` and `col`.
        shape: Of the part.
        shard: Its place. Where both dimensions are split, each process must call.

    Returns:
        float32.
    """
    row, col = payload["row"], payload["col"]
    mean = shards.mean_of(row, col, shard)
    ratio = (row / mean).masked_fill(mean == 0, 0.0)
    return (ratio.unsqueeze(1) * col).view(shape)


def splits_rows_only(param: Tensor) -> bool:
    """Whether a sharded parameter is split along dimension 0 alone, or held whole by each."""
    like: Any = param
    return is_sharded(param) and all(
        placement.is_replicate() or placement.is_shard(0) for placement in like.placements
    )


def own_rows(param: Tensor) -> tuple[int, int]:
    """The first of this process's rows of dimension 0, and how many there are."""
    if not is_sharded(param):
        return 0, param.shape[0] if param.dim() else 1
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    like: Any = param
    shape, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return (offset[0], shape[0]) if shape else (0, 1)


def place(value: Tensor, param: Tensor) -> Tensor:
    """A state as its parameter is sharded: of a whole plain tensor, this process's part."""
    if not is_sharded(param) or is_sharded(value) or value.shape != param.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = param
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def check_unsharded(params: Iterable[Tensor]) -> None:
    """Raise ValueError for a float32 DTensor: `fully_shard` holds its dtype already."""
    for param in params:
        if local(param) is not param and param.dtype == torch.float32:
            raise ValueError(
                f"a sharded parameter of shape {tuple(param.shape)} is float32 and cannot be "
                "converted any more: call model.to(torch.bfloat16) before fully_shard"
            )
