"""Min/max groups of log-probabilities whose backward reads only their exp()."""

from dataclasses import dataclass, fields

from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host

SPAN = 20.0
"""Log-probabilities further below 0 count as `-SPAN`: exp(-20) is 2e-9."""


@dataclass(frozen=True, kw_only=True)
class LogGroup(Group):
    """`Group` of log-probabilities, clamped at `-SPAN`.

    The log-probability of a masked class (-inf, -1e9) would make its group NaN or its steps too
    wide. Configs do not name this class: it replaces the `Group` of a config for such ops.

    Memory:
        As `Group`, and a copy of `x` during `compress`.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.0, -1.0, -2.0, -3.0, -1e9, float("-inf"), -4.0, -5.0])
        >>> packed = LogGroup(bits=8, group_size=8).compress(x, key=Key())
        >>> packed.tensors["bounds"].tolist()
        [[-20.0, 0.0]]
    """

    def kernel(self, x: Tensor) -> None:
        """Return None: the specialized kernel does not clamp."""
        return

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Clamp `x` and quantise it as `Group` does."""
        return super().compress(x.detach().clamp(min=-SPAN), key=key)


def of_logarithms(compressor: Compressor) -> Compressor:
    """Return a compressor with `LogGroup` in place of `Group`.

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
    """Clamp log-probabilities at `-SPAN` in place, if the compressor would."""
    if of_logarithms(compressor) != compressor:
        logarithms.clamp_(min=-SPAN)
