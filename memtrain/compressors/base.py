"""The protocol of compressors: a frozen value that turns a tensor into a payload and back."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from memtrain.kernels.cpu import calls

if TYPE_CHECKING:
    from memtrain.kernels.norm.norm import Codes
    from memtrain.kernels.step.shard import Shard

_MASK = (1 << 64) - 1


def _mixed_here(*fields: int) -> int:
    state = 0
    for field in fields:
        state = (state + field + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state - (1 << 64) if state >> 63 else state


_mixed = _mixed_here if calls is None else calls.mixed


class Key(NamedTuple):
    """Key of the random bits: equal keys give equal payloads.

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
        return (_mixed_here if is_compiling() else _mixed)(*self)  # no one can trace the other


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


ACTIVATION = "saved activation"
CHECKPOINTED_INPUT = "checkpointed module's input"
STATE = "optimizer state"
GRADIENT_SUM = "gradient accumulation"
SAVED = frozenset({ACTIVATION, CHECKPOINTED_INPUT})
EVERY_SEAT = SAVED | {STATE, GRADIENT_SUM}


@runtime_checkable
class Compressor(Protocol):
    """A frozen dataclass without mutable state that turns a tensor into a payload and back.

    Subclass it, write `compress` and `decompress`, and name the payload's tensors in `parts`; every
    other attribute has a default, and nothing else is read by whoever uses a compressor. It works
    on tensors without data too (meta and fake ones): so bytes are told before training.

    Attributes:
        parts: Names of the payload's tensors, of whatever shape: a state that is a dict of these is
            known as a payload. Empty: it cannot be an optimizer state.
        seats: Where a config may name it.
        signed: Whether negative values come back as such; without, no state of either sign.
        rounding: `"stochastic"` where `compress` reads its key, else `"nearest"`.
        bits: Bits per element, where they can be chosen.
        second_moment: Whether it can hold Adam's second moment, by whose root the update is
            divided: small positive numbers must not come back as zero.
        shaped: Whether `compress` wants a saved activation as it is, any strides, and gives back
            its order of dimensions in memory. Others get the elements in memory order, 1-d.
        reads_rows: Whether `compress` also takes a matrix with gaps between its rows, and copies
            none. Then a saved activation that lies so in memory is given as it lies, and
            `decompress` is asked for another shape of as many elements, in the same order.
        whole_rows: Whether `for_saved` chooses by the shape of a saved activation.
        is_identity: Whether the payload is the tensor itself.
        lossless: Whether every number comes back exactly.
        gives_derivative: Whether `decompress` gives a derivative at the tensor, not the tensor.
        fused_only: Whether only a fused step may write it, as a state: what it loses goes to the
            weight.
        zeros_from_zeros: Whether a payload of zero bytes decodes to zeros.
        by_rows: How checkpoints of sharded states lay out its payload (`optim.states.rows`):
            `block`, `rank1` or `factored`; of others they hold plain tensors.

    Example:
        >>> from memtrain.compressors import Group, Identity
        >>> Group().shaped, Group().rounding, Identity().is_identity
        (False, 'stochastic', True)
    """

    parts: tuple[str, ...] = ()
    seats: frozenset[str] = EVERY_SEAT
    signed: bool = True
    rounding: str = "nearest"
    bits: Any = None
    shaped: bool = False
    reads_rows: bool = False
    whole_rows: bool = False
    second_moment: bool = True
    is_identity: bool = False
    lossless: bool = False
    gives_derivative: bool = False
    fused_only: bool = False
    zeros_from_zeros: bool = False
    by_rows: str = ""

    @abstractmethod
    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Turn `x` into a payload; `key` feeds stochastic rounding."""
        ...

    @abstractmethod
    def decompress(self, packed: Packed) -> Tensor:
        """Turn a payload back into a tensor of its shape and dtype."""
        ...

    def serves(self, seat: str) -> bool:
        """Whether a config may name it for one of `seats`."""
        named = bool(self.parts) if seat == STATE else True
        return seat in self.seats and named and (self.signed or seat != GRADIENT_SUM)

    def with_width(self, bits: int) -> "Compressor":
        """The same compressor at so many bits; of those that have a field `bits`."""
        return replace(self, bits=bits)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def kernels(
        self, x: Tensor, shape: Sequence[int]
    ) -> tuple[Callable[[Tensor, int], tuple[Tensor, ...]], Callable[..., Tensor], int] | None:
        """Functions of `compress` and `decompress` for tensors like `x`; None: there are none.

        Args:
            x: A plain dense tensor, or a matrix with gaps between its rows; those alike have its
                shape, strides, dtype and device.
            shape: Of what `decompress` returns: as many elements.

        Returns:
            A function `(tensor, seed)` that gives the payload's tensors, in the order of `parts`,
            of the elements as they lie in memory; one `(*payload's tensors)` that gives the tensor,
            contiguous; and a payload's bytes.
        """
        return None

    def group_codes(self, key: Key) -> "Codes | None":
        """How kernels that quantise their own result make this payload; None: they do not."""
        return None

    def compress_part(self, x: Tensor, *, key: Key, shard: "Shard") -> Packed:
        """`compress` of this process's part of a state; each process of its groups must call."""
        return self.compress(x, key=key)

    def decompress_part(self, packed: Packed, *, shard: "Shard") -> Tensor:
        """`decompress` of what `compress_part` made; each process of its groups must call."""
        return self.decompress(packed)

    def for_shape(self, shape: torch.Size) -> "tuple[Compressor, str]":
        """Compressor for a state of this shape, and the reason if it is another one."""
        return self, ""

    def for_saved(self, shape: torch.Size) -> "Compressor":
        """Compressor for a saved activation of this shape, which `compress` sees flat."""
        return self

    def for_rows(self, columns: int) -> "tuple[Compressor, str]":
        """Compressor that is alike however rows of so many elements are split over processes.

        With the reason if it is another one. By default `self`: what it knows of the whole is the
        same on every process.
        """
        return self, ""
