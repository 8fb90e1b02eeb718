"""Min/max groups of logarithms, of which only exp() is asked."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from memtrain.compressors.base import Compressor, Key, Packed
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host

SPAN = 20.0
"""How far below the largest of its group a logarithm counts: exp(-20) is 2e-9."""


@dataclass(frozen=True, kw_only=True)
class LogGroup(Group):
    """`Group` of logarithms, as log-softmax gives them: a range ends `SPAN` below its largest.

    A class that is masked (-inf, -1e9) would make its group NaN, or its steps too wide for the
    others. Of what lies lower, exp() is below 2e-9 of the largest one's, and stays so. A group of
    nothing but -inf gives half of the dtype's lowest number, whose exp() is 0 too.

    Not to be named in configs: it takes the place of a `Group` that they name for such an op.

    Memory:
        As `Group`; while `compress` runs, a copy of `x` besides.

    Example:
        >>> x = torch.tensor([0.0, -1.0, -2.0, -3.0, -1e9, float("-inf"), -4.0, -5.0])
        >>> packed = LogGroup(bits=8, group_size=8).compress(x, key=Key())
        >>> packed.tensors["bounds"].tolist()
        [[-20.0, 0.0]]
    """

    def kernels(self, x: Tensor, shape: object) -> None:
        """None: none of them ends a range."""
        return

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Quantise `x`, as `Group` does, within its groups' ranges."""
        return super().compress(_within(x.detach(), self.group_size), key=key)


def of_logarithms(compressor: Compressor) -> Compressor:
    """The compressor with `LogGroup` in place of `Group`; others are as they were.

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


def _within(x: Tensor, group_size: int) -> Tensor:
    flat = x.reshape(-1)
    out, whole = torch.empty_like(flat), flat.numel() // group_size * group_size
    # Finite in the float32 of groups, and when it is rounded outwards to bfloat16.
    lowest = max(torch.finfo(x.dtype).min, torch.finfo(torch.float32).min) / 2
    for part, to in ((flat[:whole], out[:whole]), (flat[whole:], out[whole:])):
        if part.numel():
            groups = part.view(-1, min(group_size, part.numel()))
            floor = groups.amax(1, keepdim=True).sub_(SPAN).clamp_(min=lowest)
            torch.maximum(groups, floor, out=to.view_as(groups))
    return out.view(x.shape)
