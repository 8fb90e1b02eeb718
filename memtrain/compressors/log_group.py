"""Min/max groups of log-probabilities, of which only exp() is asked."""

from dataclasses import dataclass, fields

from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host

SPAN = 20.0
"""How far below 0 a log-probability counts: exp(-20) is 2e-9."""


@dataclass(frozen=True, kw_only=True)
class LogGroup(Group):
    """`Group` of log-probabilities without what exp() makes zero.

    A class that is masked (-inf, -1e9) would make its group NaN, or its steps too wide for the
    others. What lies `SPAN` below 0 is taken for that: its exp() is below 2e-9, and stays so.

    Not to be named in configs: it takes the place of a `Group` that they name for such an op.

    Memory:
        As `Group`; while `compress` runs, a copy of `x` besides.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.0, -1.0, -2.0, -3.0, -1e9, float("-inf"), -4.0, -5.0])
        >>> packed = LogGroup(bits=8, group_size=8).compress(x, key=Key())
        >>> packed.tensors["bounds"].tolist()
        [[-20.0, 0.0]]
    """

    def kernels(self, x: Tensor, shape: object) -> None:
        """Return None: the specialized kernels do not clamp."""
        return

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Clamp `x`, then quantise it as `Group` does."""
        return super().compress(x.detach().clamp(min=-SPAN), key=key)


def of_logarithms(compressor: Compressor) -> Compressor:
    """Replace `Group` with `LogGroup` in a compressor; others are returned unchanged.

    Example:
        >>> of_logarithms(Group(bits=8)).bits, type(of_logarithms(Group())).__name__
        (8, 'LogGroup')
    """
    if type(compressor) is Group:
        return LogGroup(**{field.name: getattr(compressor, field.name) for field in fields(Group)})
    if isinstance(compressor, Host):
        return Host(inner=of_logarithms(compressor.inner))
    return compressor


def cut_(logarithms: Tensor, compressor: Compressor) -> None:
    """Raise log-probabilities below `-SPAN` to that, in place, where `LogGroup` would."""
    if of_logarithms(compressor) != compressor:
        logarithms.clamp_(min=-SPAN)
