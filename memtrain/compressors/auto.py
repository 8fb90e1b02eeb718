"""Placeholder for compressors whose bit widths are chosen during training."""

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
    """A rule's `bits: auto`: a compressor whose widths are chosen during training.

    The template is a `Group`, a `Samples`, or a `Host` with one of them. Until widths are chosen,
    its own bits are used.
    """

    roles = frozenset({ACTIVATION})

    template: Any

    def __post_init__(self) -> None:
        if not isinstance(self._inner, Group | Samples):
            name = type(self._inner).__name__
            raise ValueError(f"bits='auto' for {name}; allowed: group, samples, host of one")

    @property
    def _inner(self) -> Any:
        return self.template.inner if isinstance(self.template, Host) else self.template

    @property
    def per_sample(self) -> bool:
        """Whether samples may get different widths."""
        return isinstance(self._inner, Samples)

    @property
    def group_size(self) -> int:
        """Elements per group."""
        return self._inner.group_size

    def with_bits(self, widths: Sequence[int]) -> Compressor:
        """Return the template with these widths for equal parts of the samples.

        A `Group` takes their mean, rounded down.
        """
        bits = tuple(widths) if self.per_sample else sum(widths) // len(widths)
        inner = replace(self._inner, bits=bits)
        return Host(inner=inner) if isinstance(self.template, Host) else inner

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return the template's payload."""
        return self.template.compress(x, key=key)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the template's tensor."""
        return self.template.decompress(packed)
