"""The one protocol: a frozen value that turns a tensor into a payload and back."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


class Key(NamedTuple):
    """What feeds every random bit: equal keys give equal payloads.

    `site` is a number made from the site's name; `rank` is 0 for replicated tensors; a
    recomputation reuses its key.
    """

    seed: int = 0
    site: int = 0
    step: int = 0
    microbatch: int = 0
    call: int = 0
    rank: int = 0

    def bits(self) -> int:
        """The six fields mixed to a signed 64-bit seed (splitmix64 over each field in turn).

        Example:
            >>> Key(seed=1).bits() == Key(seed=1).bits() != Key(seed=2).bits()
            True
        """
        state = 0
        for field in self:
            state = (state + field + 0x9E3779B97F4A7C15) & _MASK
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
            state ^= state >> 31
        return state - (1 << 64) if state >> 63 else state


class Packed(NamedTuple):
    """The payload: named tensors, and the shape and dtype that they stand for."""

    tensors: dict[str, Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the payload's tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class Keep:
    """The choice that leaves a tensor as it is, in place of a compressor.

    Args:
        reason: Why, as reports show it.

    Example:
        >>> Keep("no rule matches").reason
        'no rule matches'
    """

    reason: str


@runtime_checkable
class Compressor(Protocol):
    """A frozen dataclass without mutable state: what it must remember is in the last payload.

    One whose class says `shaped = True` works on dimensions: of activations it is handed the
    tensor itself, any strides, and gives back the same order of dimensions in memory. The others
    are handed the elements in memory order, one-dimensional.
    """

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Turn `x` into a payload; `key` feeds stochastic rounding."""
        ...

    def decompress(self, packed: Packed) -> Tensor:
        """Turn a payload back into a tensor of its shape and dtype."""
        ...
