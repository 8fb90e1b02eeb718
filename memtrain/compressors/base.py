"""The protocol of compressors: frozen values that convert a tensor to a payload and back."""

from abc import abstractmethod
from collections.abc import Callable
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

    `site` is a hash of the site's name. `rank` is 0 for replicated tensors. A recomputation uses
    the key of its forward.
    """

    seed: int = 0
    site: int = 0
    step: int = 0
    microbatch: int = 0
    call: int = 0
    rank: int = 0

    def bits(self) -> int:
        """Mix the six fields to a signed 64-bit seed (splitmix64 over each field in turn)."""
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
    """The decision to keep a tensor as it is, with the reason that reports print."""

    reason: str


ACTIVATION = "saved activation"
CHECKPOINTED_INPUT = "checkpointed module's input"
STATE = "optimizer state"
SAVED = frozenset({ACTIVATION, CHECKPOINTED_INPUT})
EVERY_ROLE = SAVED | {STATE}


@runtime_checkable
class Compressor(Protocol):
    """A frozen dataclass that converts a tensor to a payload and back.

    A subclass defines `compress` and `decompress`, and names the payload's tensors in `parts`.
    Callers read no attribute besides these. A compressor also accepts tensors without data (meta
    and fake), so that bytes are known before training. `decompress` raises for a payload whose
    sizes do not match its shape, because kernels read memory by address.

    Attributes:
        parts: Names of the payload's tensors. A state that is a dict with these keys is a payload.
            A compressor without parts cannot store optimizer states.
        roles: Where a config may use the compressor: members of `EVERY_ROLE`.
        signed: Whether negative values are preserved. If not, states with a sign are refused.
        rounding: `"stochastic"` if `compress` reads its key, else `"nearest"`.
        bits: Bits per element, if they can be chosen.
        first_moment: Whether a momentum can be stored: errors of positive and negative values
            have the same distribution.
        second_moment: Whether Adam's second moment can be stored: no positive number decodes to
            zero or below.
        shaped: Whether `compress` takes a saved activation with its shape and strides, and
            `decompress` restores the order of dimensions. Others take a 1-d tensor in memory order.
        reads_rows: Whether `compress` reads a matrix with gaps between its rows without a copy.
            `decompress` may then return another shape with as many elements.
        whole_rows: Whether `for_saved` depends on the shape of a saved activation.
        is_identity: Whether the payload is the tensor itself.
        lossless: Whether every number is restored exactly.
        gives_derivative: Whether `decompress` returns a derivative at the tensor.
        fused_only: Whether only a fused step may write a state with it, because the step adds the
            residual to the weight.
        zeros_from_zeros: Whether a payload of zero bytes decodes to zeros.
        by_rows: Layout of the payload in checkpoints of sharded states (`optim.states.rows`).
            Without a layout, checkpoints contain the decompressed tensor.

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
        """Make `decompress` check its payload first."""
        super().__init_subclass__(**options)
        if "decompress" in vars(cls):
            setattr(cls, "decompress", _checked(cls.decompress))  # noqa: B010 (a method's type)

    def check_payload(self, packed: Packed) -> None:
        """Check the sizes of a payload's tensors.

        Raises:
            ValueError: If a part is missing or has another number of elements.
        """
        for part in packed.tensors.values():
            if part.is_meta or isinstance(part, FakeTensor):
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
        """Return whether a config may use the compressor in a role."""
        return role in self.roles and (bool(self.parts) or role != STATE)

    def with_width(self, bits: int) -> "Compressor":
        """Return the same compressor with another number of `bits`."""
        return replace(self, bits=bits)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def kernel(self, x: Tensor) -> tuple[Callable[[Tensor, int], tuple[Tensor, ...]], int] | None:
        """Return a specialized `compress` function for tensors like `x`, and its payload's bytes.

        `x` is a plain dense tensor, or a matrix with gaps between its rows. The function accepts
        every tensor with the same shape, strides, dtype and device. It takes such a tensor and a
        seed, reads elements in memory order, and returns the payload's tensors in the order of
        `parts`. Without such a function, the result is None.
        """
        return None

    def group_codes(self, key: Key) -> "Codes | None":
        """Return the options of kernels that compress their own result to this payload, or None."""
        return None

    def compress_part(self, x: Tensor, *, key: Key, shard: "Shard") -> Packed:
        """Compress this process's part of a state; collective over the shard's process groups."""
        return self.compress(x, key=key)

    def decompress_part(self, packed: Packed, *, shard: "Shard") -> Tensor:
        """Decompress the result of `compress_part`; collective over the shard's groups."""
        return self.decompress(packed)

    def for_shape(self, shape: torch.Size) -> "tuple[Compressor, str]":
        """Return the compressor for a state of this shape, and the reason if it is another one."""
        return self, ""

    def for_saved(self, shape: torch.Size) -> "Compressor":
        """Return the compressor for a saved activation of this shape."""
        return self

    def for_rows(self, columns: int) -> "tuple[Compressor, str]":
        """Return a compressor whose payload is independent of the split of rows over processes.

        The second value is the reason for another compressor than `self`.
        """
        return self, ""


def _checked(decompress: Callable[[Any, Packed], Tensor]) -> Callable[[Any, Packed], Tensor]:
    @wraps(decompress)
    def checked(self: Compressor, packed: Packed) -> Tensor:
        if not is_compiling():
            self.check_payload(packed)
        return decompress(self, packed)

    return checked


@lru_cache(maxsize=4096)
def _sizes(
    compressor: Compressor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[str, int], ...]:
    """Return the names and numbers of elements of a payload's parts, from a meta tensor."""
    x = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device="meta")
    found = compressor.compress(x, key=Key()).tensors
    return tuple((name, part.numel()) for name, part in found.items())
