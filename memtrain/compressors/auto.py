"""Bits that are decided while training runs: what stands in a plan until they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from memtrain.compressors.base import ACTIVATION, Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host
from memtrain.compressors.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Auto(Compressor):
    """A rule's `bits: auto`: a compressor whose widths somebody else decides.

    Alone it is its template, with the template's own bits.

    Args:
        template: A `Group`, a `Samples`, or a `Host` of one; everything but its bits holds.

    Raises:
        ValueError: If the template is another compressor.

    Memory:
        That of the template.

    Example:
        >>> Auto(template=Group()).with_bits((3,))
        Group(bits=3, group_size=256, rounding='stochastic', bounds='bf16', whole_rows=False)
    """

    roles = frozenset({ACTIVATION})

    template: Any

    def __post_init__(self) -> None:
        inner = _inner(self.template)
        if not isinstance(inner, Group | Samples):
            name = type(inner).__name__
            raise ValueError(f"bits='auto' for {name}; allowed: group, samples, host of one")

    @property
    def per_sample(self) -> bool:
        """Whether samples may get different widths."""
        return isinstance(_inner(self.template), Samples)

    @property
    def group_size(self) -> int:
        """Elements per group."""
        return _inner(self.template).group_size

    def with_bits(self, widths: Sequence[int]) -> Compressor:
        """Return the template with these widths.

        Args:
            widths: For equal parts of the samples; of several, a `Group` takes the mean, rounded
                down.
        """
        return _with_bits(self.template, tuple(widths))

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return the template's payload."""
        return self.template.compress(x, key=key)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the template's tensor."""
        return self.template.decompress(packed)


def _inner(template: Any) -> Group | Samples:
    return template.inner if isinstance(template, Host) else template


def _with_bits(template: Any, widths: tuple[int, ...]) -> Compressor:
    if isinstance(template, Host):
        return Host(inner=_with_bits(template.inner, widths))
    if isinstance(template, Samples):
        return replace(template, bits=widths)
    return replace(template, bits=sum(widths) // len(widths))
