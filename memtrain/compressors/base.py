"""The compressor protocol: a frozen value that converts a tensor to a payload and back."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from memtrain.kernels.norm.norm import Codes
    from memtrain.kernels.step.shard import Shard

_MASK = (1 << 64) - 1


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
        """Mix the six fields to a signed 64-bit seed (splitmix64 over each field in turn).

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
    """A payload: named tensors, and the shape and dtype of the tensor that they represent."""

    tensors: dict[str, Tensor]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the payload's tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True)
class Keep:
    """The decision to keep a tensor as it is, in place of a compressor.

    Args:
        reason: The reason, as reports show it.

    Example:
        >>> Keep("no rule matches").reason
        'no rule matches'
    """

    reason: str


ACTIVATION = "saved activation"
CHECKPOINTED_INPUT = "checkpointed module's input"
STATE = "optimizer state"
SAVED = frozenset({ACTIVATION, CHECKPOINTED_INPUT})
EVERY_ROLE = SAVED | {STATE}


@runtime_checkable
class Compressor(Protocol):
    """A frozen dataclass without mutable state that converts a tensor to a payload and back.

    A subclass defines `compress` and `decompress`, and names the payload's tensors in `parts`.
    Every other attribute has a default, and users of a compressor read nothing else. It also works
    on tensors without data (meta and fake), so that bytes are known before training.
    `decompress` refuses a payload whose sizes differ from those that `compress` gives for the
    shape: kernels read memory by address.

    Attributes:
        parts: Names of the payload's tensors: a state that is a dict with these keys is a payload.
            Empty: not allowed for optimizer states.
        roles: Where a config may use it: members of `EVERY_ROLE`.
        signed: Whether negative values are preserved; else not allowed for states with a sign.
        rounding: `"stochastic"` where `compress` reads its key, else `"nearest"`.
        bits: Bits per element, where they can be chosen.
        first_moment: Whether it can store a momentum: positive and negative values have errors
            of the same distribution.
        second_moment: Whether it can hold Adam's second moment, by whose root the update is
            divided: no positive number may come back as zero or below.
        shaped: Whether `compress` wants a saved activation as it is, any strides, and gives back
            its order of dimensions in memory. Others get the elements in memory order, 1-d.
        reads_rows: Whether `compress` also takes a matrix with gaps between its rows, and copies
            none. Then a saved activation that lies so in memory is given as it lies, and
            `decompress` is asked for another shape of as many elements, in the same order.
        whole_rows: Whether `for_saved` depends on the shape of a saved activation.
        is_identity: Whether the payload is the tensor itself.
        lossless: Whether every number comes back exactly.
        gives_derivative: Whether `decompress` gives a derivative at the tensor, not the tensor.
        fused_only: Whether only a fused step may write it as a state, because its residual goes to
            the weight.
        zeros_from_zeros: Whether a payload of zero bytes decodes to zeros.
        by_rows: How checkpoints of sharded states lay out its payload (`optim.states.rows`):
            `block`, `rank1` or `factored`; of others they hold plain tensors.

    Example:
        >>> from memtrain.compressors import Group, Identity
        >>> Group().shaped, Group().rounding, Identity().is_identity
        (False, 'stochastic', True)
    """

    parts: tuple[str, ...] = ()
    roles: frozenset[str] = EVERY_ROLE
    signed: bool = True
    rounding: str = "nearest"
    bits: Any = None
    shaped: bool = False
    reads_rows: bool = False
    whole_rows: bool = False
    first_moment: bool = True
    second_moment: bool = False
    is_identity: bool = False
    lossless: bool = False
    gives_derivative: bool = False
    fused_only: bool = False
    zeros_from_zeros: bool = False
    by_rows: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Make the class's `decompress` check its payload first."""
        super().__init_subclass__(**options)
        if "decompress" in vars(cls):
            setattr(cls, "decompress", _checked(cls.decompress))  # noqa: B010 (a method's type)

    def check_payload(self, packed: Packed) -> None:
        """Raise for a payload whose tensors have other sizes than its shape needs.

        Args:
            packed: The payload, with the shape and dtype of the tensor.

        Raises:
            ValueError: If a part is missing or has another number of elements.

        Example:
            >>> from memtrain.compressors import Block
            >>> packed = Block().compress(torch.ones(100), key=Key())
            >>> Block().decompress(packed._replace(shape=torch.Size([1000])))
            Traceback (most recent call last):
            ValueError: 'codes' has 64 elements; Block(...) needs 512 for a tensor of shape (1000,)
        """
        if not all(map(_has_memory, packed.tensors.values())):
            return
        for name, size in _sizes(self, tuple(packed.shape), packed.dtype):
            part = packed.tensors.get(name)
            if part is None or part.numel() != size:
                found = "is missing" if part is None else f"has {part.numel():,} elements"
                raise ValueError(
                    f"{name!r} {found}; {self} needs {size:,} for a tensor of shape "
                    f"{tuple(packed.shape)}"
                )

    @abstractmethod
    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Convert `x` to a payload; `key` seeds stochastic rounding."""
        ...

    @abstractmethod
    def decompress(self, packed: Packed) -> Tensor:
        """Convert a payload back to a tensor of its shape and dtype."""
        ...

    def serves(self, role: str) -> bool:
        """Return whether a config may use it in a role."""
        named = bool(self.parts) if role == STATE else True
        return role in self.roles and named

    def with_width(self, bits: int) -> "Compressor":
        """Return the same compressor with another number of bits; it needs a field `bits`."""
        return replace(self, bits=bits)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def kernels(
        self, x: Tensor, shape: Sequence[int]
    ) -> tuple[Callable[[Tensor, int], tuple[Tensor, ...]], Callable[..., Tensor], int] | None:
        """Return specialized `compress` and `decompress` functions for tensors like `x`, or None.

        Args:
            x: A plain dense tensor, or a matrix with gaps between its rows; the functions serve
                every tensor with the same shape, strides, dtype and device.
            shape: Of what `decompress` returns: as many elements.

        Returns:
            A function `(tensor, seed)` that gives the payload's tensors, in the order of `parts`,
            of the elements as they lie in memory; one `(*payload's tensors)` that gives the tensor,
            contiguous; and a payload's bytes.
        """
        return None

    def group_codes(self, key: Key) -> "Codes | None":
        """Return how kernels that quantise their own result make this payload, or None."""
        return None

    def compress_part(self, x: Tensor, *, key: Key, shard: "Shard") -> Packed:
        """Compress this process's part of a state; every process of its groups must call this."""
        return self.compress(x, key=key)

    def decompress_part(self, packed: Packed, *, shard: "Shard") -> Tensor:
        """Decompress the result of `compress_part`; every process of its groups must call this."""
        return self.decompress(packed)

    def for_shape(self, shape: torch.Size) -> "tuple[Compressor, str]":
        """Return the compressor for a state of this shape, and the reason if it is another one."""
        return self, ""

    def for_saved(self, shape: torch.Size) -> "Compressor":
        """Return the compressor for a saved activation of this shape; `compress` sees it flat."""
        return self

    def for_rows(self, columns: int) -> "tuple[Compressor, str]":
        """Return a compressor whose payload does not depend on how rows are split over processes.

        Args:
            columns: Elements per row.

        Returns:
            The compressor (`self` by default), and the reason if it is another one.
        """
        return self, ""


def _checked(decompress: Callable[[Any, Packed], Tensor]) -> Callable[[Any, Packed], Tensor]:
    @wraps(decompress)
    def checked(self: Compressor, packed: Packed) -> Tensor:
        if not is_compiling():
            self.check_payload(packed)
        return decompress(self, packed)

    return checked


def _has_memory(x: Tensor) -> bool:
    return not (x.is_meta or isinstance(x, FakeTensor))


@lru_cache(maxsize=4096)
def _sizes(
    compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[str, int], ...]:
    """Return the names and numbers of elements of a payload's parts, from a meta tensor."""
    x = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device="meta")
    found = compressor.compress(x, key=Key()).tensors
    return tuple((name, part.numel()) for name, part in found.items())
