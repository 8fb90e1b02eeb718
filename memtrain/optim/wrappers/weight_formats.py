"""In which forms weights are kept, which ones are not, and what the forward then needs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Format(NamedTuple):
    """How a weight is kept."""

    dtype: torch.dtype
    correction: torch.dtype | None = None
    stochastic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize + (self.correction.itemsize if self.correction else 0)


FORMATS = {
    "bf16": Format(torch.bfloat16),
    "bf16+sr": Format(torch.bfloat16, stochastic=True),
    "bf16+8": Format(torch.bfloat16, torch.int8),
    "bf16+16": Format(torch.bfloat16, torch.int16),
    "fp16": Format(torch.float16),
    "fp16+8": Format(torch.float16, torch.int8),
    "fp16+16": Format(torch.float16, torch.int16),
}
"""Name in a config -> how a weight is kept: `+8` and `+16` bits of correction, or `+sr`."""


class CastInputs:
    """A forward pre-hook that gives a model of 2-byte weights its float32 inputs in their dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with every float32 tensor cast."""
        return tree_map_only(Tensor, self._cast, (args, kwargs))

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype) if x.dtype == torch.float32 else x


def parse(weights: str) -> Format:
    """The format of a config's name.

    Raises:
        ValueError: For an unknown name.

    Example:
        >>> parse("bf16+8").nbytes
        3
    """
    if weights not in FORMATS:
        raise ValueError(f"weights={weights!r} is unknown; allowed: {', '.join(FORMATS)}")
    return FORMATS[weights]


def keeps_float32(model: nn.Module) -> dict[Tensor, str]:
    """Parameters that must not be converted, with the reason.

    Args:
        model: The model.

    Returns:
        Batch norms' parameters: torch computes them in float32 with their running statistics.

    Example:
        >>> [why for why in keeps_float32(nn.BatchNorm1d(4)).values()]
        ['kept: a norm with running statistics is float32', ...]
    """
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    why = "kept: a norm with running statistics is float32"
    return {param: why for module in norms for param in module.parameters(recurse=False)}
