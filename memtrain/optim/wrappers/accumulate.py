"""Sums of gradients that wait for their update in one byte an element."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memtrain.compressors.base import Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.optim.states.layout import payload_bytes
from memtrain.optim.states.shards import local, part_number, sharded_like

BUFFER = Block(block_size=256, map="E3M4", bits=8, rounding="stochastic")
"""The map has 0, -1 and 1: zeros stay zero, and rounding has no bias."""


def sum_bytes(param: Tensor) -> int:
    """Return the bytes of the compressed sum of a parameter's gradients."""
    return payload_bytes(BUFFER, local(param).shape, torch.float32)


class GradientSums:
    """Adds up the gradients of several backward passes; each sum is in blocks of 8-bit floats.

    Each incomplete sum is rounded stochastically: on average over seeds the total is exact, and
    each of the `passes - 1` roundings moves an element by less than 1/31 of the largest of its
    block (by less than 1/16 of the element itself if it is above 1/124 of the largest). NaN and Inf
    affect their block of 256. The last gradient is added in float32 and not rounded. Between the
    passes a sum takes 1.016 bytes per parameter.
    """

    def __init__(self, passes: int, seed: int = 0) -> None:
        self.passes, self.seed = passes, seed
        self.steps = 0
        """Steps so far: each draws other random bits."""
        self._sums: dict[Tensor, tuple[dict[str, Tensor], int]] = {}  # payload, gradients in it

    def add(self, param: Tensor, number: int, grad: Tensor) -> Tensor | None:
        """Add a gradient of the parameter with this number; return the float32 sum if complete."""
        payload, count = self._sums.pop(param, ({}, 0))
        count += 1
        total = local(grad.detach()).float()
        if payload:
            total = total + self._decoded(param, payload)
        if count == self.passes:
            return sharded_like(total, param)
        step, rank = self.steps, part_number(param)
        key = Key(self.seed, site=number, step=step, microbatch=count, rank=rank)
        self._sums[param] = BUFFER.compress(total, key=key).tensors, count
        return None

    @property
    def waiting(self) -> bool:
        """Whether a sum is incomplete."""
        return bool(self._sums)

    def each(self) -> Iterator[Tensor]:
        """Yield every incomplete sum."""
        return (sharded_like(self._decoded(p, values), p) for p, (values, _) in self._sums.items())

    def rest(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield and remove every incomplete sum, with its parameter."""
        while self._sums:
            param, (payload, _) = self._sums.popitem()
            yield param, sharded_like(self._decoded(param, payload), param)

    def drop(self) -> None:
        """Discard every incomplete sum."""
        self._sums.clear()

    def _decoded(self, param: Tensor, payload: dict[str, Tensor]) -> Tensor:
        return BUFFER.decompress(Packed(payload, local(param).shape, torch.float32))
