"""Codes of an activation's derivative, packed to the bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import ACTIVATION, Compressor, Key, Packed
from memtrain.compressors.fewbit.functions import FAMILIES, check_name, complete
from memtrain.compressors.fewbit.register import REGISTERED, registered
from memtrain.compressors.fewbit.solver import check_bits, table
from memtrain.compressors.fewbit.step_function import Approximation
from memtrain.kernels.derivative import derivative


def _table(function: str, bits: int, parameters: tuple[float, ...]) -> Approximation:
    if function in FAMILIES:
        return table(function, bits, parameters)
    return registered(function).table(bits)


# Does the work of torch.compiler.assume_constant_result, whose import of Dynamo takes seconds:
# a compiled region takes the table as a constant and does not trace the solver.
vars(_table)["_dynamo_marked_constant"] = True


@dataclass(frozen=True, kw_only=True)
class DerivativeCode(Compressor):
    """A code for f'(x) in place of the input x of an activation f.

    `decompress` returns the table's level for f'(x). The solver computes the table, its best step
    function for f', at first use. Piecewise-linear functions of two slopes (relu, hardtanh,
    leaky_relu ...) always use an exact table of one bit.

    NaN has code 0, so that its gradient is finite. +-Inf have the outermost levels. Elements are
    independent of each other.

    Args:
        bits: Bits per element, 1 to 8.
        function: The activation: a name in `fewbit.functions.FAMILIES`, or a function registered
            with `fewbit.register.register`.
        parameters: Arguments of the torch function after the input; torch's defaults if omitted.
            The lambd of hardshrink and softshrink must be rounded to the dtype of x, as in torch.

    Memory:
        bits / 8 bytes per element (0.375 at 3 bits), padded to whole blocks of 256 elements.

    Example:
        >>> from memtrain.compressors import Key
        >>> code = DerivativeCode(bits=1, function="relu")
        >>> code.decompress(code.compress(torch.tensor([-1.0, 0.0, 2.0]), key=Key()))
        tensor([0., 0., 1.])

    Reference:
        Novikov et al., Few-Bit Backward, ICML 2023, arXiv:2202.00441.
    """

    parts = ("codes",)
    roles = frozenset({ACTIVATION})
    gives_derivative = True

    bits: int = 3
    function: str = "gelu"
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_bits(self.bits)
        # Configs contain lists.
        object.__setattr__(self, "parameters", tuple(self.parameters))
        check_name(self.function, [*FAMILIES, *REGISTERED])
        if self.function in FAMILIES:
            complete(self.function, self.parameters)
        elif self.parameters:
            raise ValueError(
                f"parameters {self.parameters}: user-defined {self.function!r} has none"
            )

    def table(self) -> Approximation:
        """Return the step function."""
        return _table(self.function, self.bits, self.parameters)

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return the codes of `x` in logical order; `key` is unused."""
        step = self.table()
        codes = derivative.encode(x.detach(), step.boundaries, parity=step.parity)
        return Packed({"codes": codes}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the levels that approximate f'(x), contiguous."""
        n = torch.Size(packed.shape).numel()
        flat = derivative.decode(packed.tensors["codes"], self.table().levels, n, packed.dtype)
        return flat.view(packed.shape)
