"""Sums of gradients that wait for their update in one byte an element."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memtrain.compressors.base import Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.optim.states.shards import local, part_number, sharded_like

BUFFER = Block(block_size=256, map="E3M4", bits=8, rounding="stochastic")
"""How a sum is kept. The map has 0 and both signs' ends: zeros stay zero, and rounding
has no bias anywhere."""


def sum_bytes(param: Tensor) -> int:
    """Bytes of the sum of a parameter's gradients while it waits."""
    like = torch.empty(local(param).shape, device="meta")
    return BUFFER.compress(like, key=Key()).nbytes


class GradientSums:
    """Adds up the gradients of a few backward passes, with each sum in blocks of 8-bit floats.

    Each sum that has to wait is rounded stochastically: on average over seeds the total is exact,
    and each of the `passes - 1` roundings moves an element by less than 1/31 of its block's largest
    (by less than 1/16 of the element itself where that is above 1/124 of the largest). NaN and Inf
    spoil their block of 256. The last gradient is added in float32 and not rounded.

    Args:
        passes: Backward passes that make a step.
        seed: Feeds the rounding, with the parameter's number, the step and the pass.

    Memory:
        1.016 bytes per parameter between the passes.

    Example:
        >>> sums, weight = GradientSums(2), torch.ones(3)
        >>> sums.add(weight, 0, torch.tensor([1.0, 0.0, -1.0]))
        >>> sums.add(weight, 0, torch.tensor([1.0, 2.0, 3.0]))
        tensor([2., 2., 2.])
    """

    def __init__(self, passes: int, seed: int = 0) -> None:
        self.passes, self.seed = passes, seed
        self.steps = 0
        """Steps so far: each draws other random bits."""
        self._held: dict[Tensor, tuple[dict[str, Tensor], int]] = {}
        """Payloads, and of how many gradients they are the sum."""

    def add(self, param: Tensor, number: int, grad: Tensor) -> Tensor | None:
        """Take a gradient.

        Args:
            param: Whose.
            number: The parameter's.
            grad: Of its shape, sharded as it is; not kept.

        Returns:
            The sum where it is complete, in float32 (the gradient itself if one pass makes a
            step); else None.
        """
        if self.passes == 1:
            return grad
        payload, count = self._held.pop(param, ({}, 0))
        count += 1
        total = local(grad.detach()).float()
        if payload:
            total = total + self._decoded(param, payload)
        if count == self.passes:
            return sharded_like(total, param)
        step, rank = self.steps, part_number(param)
        key = Key(self.seed, site=number, step=step, microbatch=count, rank=rank)
        self._held[param] = BUFFER.compress(total, key=key).tensors, count
        return None

    @property
    def waiting(self) -> bool:
        """Whether there is a sum of fewer passes."""
        return bool(self._held)

    def rest(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give up every sum of fewer passes, with its parameter."""
        while self._held:
            param, (payload, _) = self._held.popitem()
            yield param, sharded_like(self._decoded(param, payload), param)

    def drop(self) -> None:
        """Discard every sum of fewer passes."""
        self._held.clear()

    def advance(self) -> None:
        """A step is over."""
        self.steps += 1

    def _decoded(self, param: Tensor, payload: dict[str, Tensor]) -> Tensor:
        return BUFFER.decompress(Packed(payload, local(param).shape, torch.float32))
