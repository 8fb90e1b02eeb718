"""A call of an op that also exists in a form which saves a compressor's payload."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.compressors import (
    Compressor,
    DerivativeCode,
    Host,
    Identity,
    Integers,
    Key,
    Mask,
    Samples,
)

# Compressors that give no floats, or that need the tensor's shape or the payload's own object.
HOOKED = (Identity, DerivativeCode, Mask, Integers, Samples, Host)
"""With these an op that keeps a tensor of its own making runs as it is, under hooks."""


class Call(Protocol):
    """One call of an op that also exists in a form which saves a compressor's payload."""

    @property
    def op(self) -> str:
        """The op's name in sites."""
        ...

    @property
    def tensor(self) -> str:
        """The role of its one site: `input` or `saved`."""
        ...

    @property
    def x(self) -> Tensor:
        """The tensor whose size, dtype and `requires_grad` decide whether it is worth it."""
        ...

    def accepts(self, compressor: Compressor) -> bool:
        """Whether the replaced form works with this compressor; if not, the op runs as it is."""
        ...

    def run(self, compressor: Compressor, key: Key) -> Any:
        """The op's result, its saved tensors replaced by the compressor's payload."""
        ...


def as_autocast(
    function: Callable[[Tensor], Tensor], sizes: Sequence[int], x: Tensor, *others: Tensor | None
) -> list[Any]:
    """The tensors as autocast, where it is on, hands them to `function`.

    Which functions it runs in float32 differs between devices and versions: torch is asked, on a
    tensor without elements.

    Args:
        function: The op, of its first argument.
        sizes: Of an empty tensor that it takes.
        x: Its first argument.
        *others: Its other tensors.
    """
    tensors = [x, *others]
    half = (torch.float16, torch.bfloat16)
    if not torch.is_autocast_enabled(x.device.type):
        return tensors
    probe = x.new_empty(tuple(sizes), dtype=torch.bfloat16)
    if function(probe).dtype != torch.float32:
        return tensors
    return [t.float() if t is not None and t.dtype in half else t for t in tensors]
