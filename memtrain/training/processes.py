"""Processes that train one model together: `torchrun` starts them, torch.distributed joins them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; one alone without `torchrun`."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    def part(self, size: int, index: int, parts: int) -> slice:
        """The places, among `size` rows of a step, of this process's microbatch `index`.

        Args:
            size: A multiple of the number of processes and microbatches.
            index: From 0.
            parts: Microbatches that each process makes.

        Example:
            >>> Processes(1, 2).part(8, 0, 2)
            slice(4, 6, None)
        """
        own = size // self.world // parts
        start = (self.rank * parts + index) * own
        return slice(start, start + own)

    def total(self, value: float) -> float:
        """The sum of every process's number."""
        if self.world == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64)  # on the CPU, where gloo serves
        dist.all_reduce(found)
        return found.item()

    def any(self, value: bool) -> bool:
        """Whether any process says yes."""
        return self.total(float(value)) > 0

    def told(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that `torchrun` started; a process of its own stays alone.

    Raises:
        RuntimeError: If they do not find one another.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available():
        yield Processes()
        return
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


ALONE = Processes()


def shard(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Give each process its part of a model (FSDP2), its repeated blocks one by one.

    Args:
        model: Its parameters become DTensors.
        dtype: Of its floating-point tensors, which they keep from then on; None leaves them.
    """
    from torch.distributed.fsdp import fully_shard

    if dtype is not None:
        model.to(dtype)
    if not dist.is_initialized():  # one process: what more have written, it can read
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    blocks = [
        block
        for layers in model.modules()
        if isinstance(layers, nn.ModuleList)
        for block in layers
        if any(True for _ in block.parameters())
    ]
    inner = {module for block in blocks for module in block.modules() if module is not block}
    for block in blocks:
        if block not in inner:
            fully_shard(block)
    fully_shard(model)


def replicate(model: nn.Module) -> nn.Module:
    """Put a model, wrapped already, into DistributedDataParallel."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@contextmanager
def unsynchronised(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Let gradients add up in each process, until the last microbatch of a step.

    Args:
        model: Of `replicate` or `shard`, or another.
        last: Whether the microbatch is a step's last.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, nn.Module) and hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
    yield
