"""Parts of parameters that are split over processes (DTensor)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.kernels.step.shard import Shard, for_collectives

USUAL = {nn.Parameter, Tensor}
"""Types of tensors that are not sharded, and no other subclass."""


def local(x: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; another tensor itself."""
    inner = getattr(x, "_local_tensor", None)
    return x if inner is None else inner


def is_sharded(x: Tensor) -> bool:
    """Whether `x` is a DTensor."""
    return local(x) is not x


def sharded_like(value: Tensor, param: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return a part as a DTensor that is sharded like `param`, over the memory of `value`.

    `shape` is that of the whole, by default the parameter's. If `param` is not sharded, the result
    is `value`.
    """
    if not is_sharded(param):
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    like: Any = param
    stride = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
    whole = TensorMeta(like.shape if shape is None else shape, stride, value.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=whole)
    # As FSDP2 makes them: `from_local` moves what lies on the host (CPUOffloadPolicy) to the mesh.
    return DTensor(value, spec, requires_grad=value.requires_grad)


def whole_of(x: Tensor) -> Tensor:
    """Gather a small sharded tensor, by a collective, on its part's device; return others as is."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import DTensor

    parts: Any = x
    part = local(x)
    sent = for_collectives(part, parts.device_mesh.get_group(0))
    if sent is not part:
        parts = DTensor(sent, parts._spec, requires_grad=False)
    return parts.full_tensor().to(part.device)


def same_placement(value: Tensor, param: Tensor) -> bool:
    """Whether a state is split over processes as its parameter is."""
    if not is_sharded(param):
        return not is_sharded(value)
    one: Any = value
    other: Any = param
    return is_sharded(value) and tuple(one.placements) == tuple(other.placements)


def local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """Return this process's part of a parameter's gradient."""
    if is_sharded(param) and not same_placement(grad, param):
        like: Any = param
        whole: Any = grad
        # The copy waits for the collective: kernels read the memory itself.
        return whole.redistribute(placements=like.placements).to_local().clone()
    return local(grad)


def wait_for_part(grad: Tensor) -> None:
    """Wait until a sharded gradient's part has arrived in host memory.

    FSDP2's `CPUOffloadPolicy` copies without waiting, to pinned memory, in the current stream of
    the hooks' call. From torch 2.13 on it waits itself if there are hooks.
    """
    part = local(grad)
    if part is not grad and part.is_cpu and torch.cuda.is_initialized() and part.is_pinned():
        torch.cuda.current_stream().synchronize()


def shard_of(param: Tensor) -> Shard | None:
    """Return how a parameter is split; None if this process has all of it."""
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
    """Return the number of this process's part: equal for replicas, 0 for a whole parameter."""
    if not is_sharded(param):
        return 0
    like: Any = param
    mesh, number = like.device_mesh, 0
    for m, placement in enumerate(like.placements):
        if placement.is_shard():
            number = number * mesh.size(m) + mesh.get_local_rank(m)
    return number


def splits_rows_only(param: Tensor) -> bool:
    """Whether a parameter is sharded along dimension 0 only, or replicated."""
    like: Any = param
    return is_sharded(param) and all(
        placement.is_replicate() or placement.is_shard(0) for placement in like.placements
    )


def splits_rows(param: Tensor) -> bool:
    """Whether a parameter is sharded along dimension 0 only, perhaps over one process."""
    like: Any = param
    return splits_rows_only(param) and any(p.is_shard() for p in like.placements)


def local_rows(param: Tensor) -> tuple[int, int]:
    """Return the first of this process's rows of dimension 0, and their number."""
    if not is_sharded(param):
        return 0, param.shape[0] if param.dim() else 1
    offset, shape = _offset_and_shape(param)
    return (offset[0], shape[0]) if shape else (0, 1)


def placed_as(value: Tensor, param: Tensor) -> Tensor:
    """Return a whole plain state as a tensor that is sharded like its parameter."""
    if not is_sharded(param) or is_sharded(value) or value.shape != param.shape:
        return value
    part = value.to(param.device)
    for dim, (begin, size) in enumerate(zip(*_offset_and_shape(param), strict=True)):
        part = part.narrow(dim, begin, size)
    return sharded_like(part.contiguous(), param)


def _offset_and_shape(param: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offset and the shape of this process's part of a sharded parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return offset, shape


def check_unsharded(params: Iterable[Tensor]) -> None:
    """Raise ValueError for a float32 DTensor: `fully_shard` holds its dtype already."""
    for param in params:
        if local(param) is not param and param.dtype == torch.float32:
            raise ValueError(
                f"a sharded parameter of shape {tuple(param.shape)} is float32 and cannot be "
                "converted any more: call model.to(torch.bfloat16) before fully_shard"
            )


def in_zero(params: Iterable[Tensor]) -> bool:
    """Whether DeepSpeed's ZeRO has moved parameters into its flat vectors.

    ZeRO sets `_hp_mapping` (stages 1 and 2) or `ds_id` (stage 3) on each parameter.
    """
    return any(hasattr(param, name) for param in params for name in ("_hp_mapping", "ds_id"))
