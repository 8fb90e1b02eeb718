"""Nonlinearities that save derivative codes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from memtrain.activations.fewbit import fewbit
from memtrain.compressors import Compressor, DerivativeCode, Key

NAMES = ("gelu", "silu", "relu")

# Modules that write a nonlinearity out in several ops, each of which saves a tensor.
MODULES = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
}


@dataclass(frozen=True, eq=False)
class Nonlinearity:
    """A call of a nonlinearity: which, on what, in place or not."""

    op: str
    x: Tensor
    inplace: bool = False
    tensor: str = "input"

    def accepts(self, compressor: Compressor) -> bool:
        """Derivative codes of any width."""
        return isinstance(compressor, DerivativeCode)

    def run(self, compressor: Compressor, key: Key) -> Tensor:
        """The value, with codes in place of saved tensors; nothing random."""
        if not isinstance(compressor, DerivativeCode):
            raise TypeError(f"{self.op} with {compressor!r}; allowed: a DerivativeCode")
        # A piecewise-linear function is exact with one bit.
        bits = 1 if self.op == "relu" else compressor.bits
        return fewbit(
            self.x, replace(compressor, function=self.op, bits=bits), inplace=self.inplace
        )


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Nonlinearity | None:
    """A call of a nonlinearity as function, method or in-place form; None for another op."""
    base = name.rstrip("_")
    values = dict(zip(("input", "option"), args, strict=False)) | dict(kwargs)
    x = values.get("input")
    if base not in NAMES or not isinstance(x, Tensor):
        return None
    if base == "gelu":
        approximate = values.get("approximate", values.get("option", "none"))
        return Nonlinearity("gelu_tanh" if approximate == "tanh" else "gelu", x, name != base)
    inplace = name != base or bool(values.get("inplace", values.get("option", False)))
    return Nonlinearity(base, x, inplace)


def recognise_module(module: nn.Module, x: Tensor) -> Nonlinearity:
    """The call that a module of `MODULES` stands for."""
    return Nonlinearity(MODULES[type(module).__name__], x)
