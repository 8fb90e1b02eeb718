"""Log-probabilities whose backward reads only their exp()."""

from dataclasses import replace

from torch import Tensor

from memtrain.compressors.base import Compressor
from memtrain.compressors.group import Group
from memtrain.compressors.host import Host

SPAN = 20.0
"""Log-probabilities further below 0 count as probability 0: exp(-20) is 2e-9, which times the -1e9
of a masked logit would not be small."""


def of_logarithms(compressor: Compressor) -> Compressor:
    """Return the compressor for log-probabilities: a `Group` with a floor at `-SPAN`.

    The log-probability of a masked class (-inf, -1e9) would make its group NaN or its steps too
    wide.
    """
    if isinstance(compressor, Group):
        return replace(compressor, floor=-SPAN)
    if isinstance(compressor, Host):
        return Host(inner=of_logarithms(compressor.inner))
    return compressor


def cut_(logarithms: Tensor, compressor: Compressor) -> None:
    """Clamp log-probabilities at `-SPAN` in place, if the compressor would."""
    if of_logarithms(compressor) != compressor:
        logarithms.clamp_(min=-SPAN)
