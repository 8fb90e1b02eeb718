"""Derivative codes: the index of a few-bit table's step for each element, packed to the bit."""

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


# What torch.compiler.assume_constant_result does, without its import of all of Dynamo (seconds):
# a compiled region takes the table as a constant and does not trace the solver.
vars(_table)["_dynamo_marked_constant"] = True


@dataclass(frozen=True, kw_only=True)
class DerivativeCode(Compressor):
    """Stores what an activation's backward needs of its input: a code for f'(x).

    `decompress` gives the table's level for f'(x), not x. The table is the solver's best step
    function for f', made at first use. Piecewise-linear functions of two slopes (relu, hardtanh,
    leaky_relu ...) have an exact table of one bit, which they use whatever `bits` says; relu's
    codes are the same whether taken from its input or its output.

    NaN in x gets code 0, so the gradient there is finite while the forward value is NaN; +-Inf get
    the outermost levels. No element touches another.

    Args:
        bits: 1 to 8 per element.
        function: The activation: a name in `fewbit.functions.FAMILIES`, or one registered by
            `fewbit.register.register`.
        parameters: The activation's, in the order of the torch function's arguments after the
            input; torch's defaults where left out. hardshrink's and softshrink's lambd must be
            rounded to the dtype of x where it has no exact value there: torch does so.

    Raises:
        ValueError: If a field is not allowed, or a name is not registered in this process.
        TypeError: If a parameter is not a number.

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
        # A config gives a list.
        object.__setattr__(self, "parameters", tuple(self.parameters))
        check_name(self.function, [*FAMILIES, *REGISTERED])
        if self.function in FAMILIES:
            complete(self.function, self.parameters)
        elif self.parameters:
            raise ValueError(
                f"parameters {self.parameters}: user-defined {self.function!r} has none"
            )

    def table(self) -> Approximation:
        """Return the step function in use.

        Raises:
            ValueError: If the function is not registered in this process.

        Example:
            >>> DerivativeCode(bits=1).table().boundaries
            (0.0,)
        """
        return _table(self.function, self.bits, self.parameters)

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        """Return the codes of `x`, in logical order; `key` is not used."""
        step = self.table()
        codes = derivative.encode(x.detach(), step.boundaries, parity=step.parity, shift=step.shift)
        return Packed({"codes": codes}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """Return the levels that approximate f'(x), contiguous."""
        n = torch.Size(packed.shape).numel()
        flat = derivative.decode(packed.tensors["codes"], self.table().levels, n, packed.dtype)
        return flat.view(packed.shape)
