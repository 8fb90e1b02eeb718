"""Min/max groups of logarithms, of which only exp() is asked."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host

SPAN = 20.0
"""How far below the largest of its row a logarithm counts: exp(-20) is 2e-9."""


@dataclass(frozen=True, kw_only=True)
class LogGroup(Group):
    """`Group` of log-probabilities, or of rows that logsumexp reads, without what exp() makes zero.

    A class that is masked (-inf, -1e9) would make its group NaN, or its steps too wide for the
    others. What lies `SPAN` below 0, or below the largest of its row, is taken for that: its exp()
    is below 2e-9 of the row's sum, and stays so. A row of nothing but -inf becomes half of the
    dtype's lowest number, whose exp() is 0 too.

    Not to be named in configs: it takes the place of a `Group` that they name for such an op.

    Args:
        row: Elements of a row, which follow each other in memory; 0: of log-probabilities, whose
            row's sum is known to be 1.

    Memory:
        As `Group`; while `compress` runs, a copy of `x` besides.

    Example:
        >>> x = torch.tensor([0.0, -1.0, -2.0, -3.0, -1e9, float("-inf"), -4.0, -5.0])
        >>> packed = LogGroup(bits=8, group_size=8).compress(x, key=Key())
        >>> packed.tensors["bounds"].tolist()
        [[-20.0, 0.0]]
    """

    row: int = 0

    def kernels(self, x: Tensor, shape: object) -> None:
        """Return None: the specialized kernels do not clamp."""
        return

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Clamp `x`, then quantise it as `Group` does."""
        x = x.detach()
        return super().compress(_in_rows(x, self.row) if self.row else x.clamp(min=-SPAN), key=key)


def of_logarithms(compressor: Compressor, row: int = 0) -> Compressor:
    """Replace `Group` with `LogGroup` in a compressor; others are returned unchanged.

    Example:
        >>> of_logarithms(Group(bits=8)).bits, type(of_logarithms(Group())).__name__
        (8, 'LogGroup')
    """
    if type(compressor) is Group:
        own = {field.name: getattr(compressor, field.name) for field in fields(Group)}
        return LogGroup(**own, row=row)
    if isinstance(compressor, Host):
        return Host(inner=of_logarithms(compressor.inner, row))
    return compressor


def cut_(logarithms: Tensor, compressor: Compressor) -> None:
    """Raise log-probabilities below `-SPAN` to that, in place, where `LogGroup` would."""
    if of_logarithms(compressor) != compressor:
        logarithms.clamp_(min=-SPAN)


def _in_rows(x: Tensor, row: int) -> Tensor:
    if not x.numel():
        return x
    rows = x.reshape(-1, row)
    # Finite in the float32 of groups, and when it is rounded outwards to bfloat16.
    lowest = max(torch.finfo(x.dtype).min, torch.finfo(torch.float32).min) / 2
    floor = rows.amax(1, keepdim=True).sub_(SPAN).clamp_(min=lowest)
    return torch.maximum(rows, floor).view(x.shape)
