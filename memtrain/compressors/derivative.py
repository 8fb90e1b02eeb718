"""Derivative codes: which step of a few-bit table each element falls on, packed to the bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.compressors.base import Key, Packed
from memtrain.compressors.fewbit_functions import CURVES
from memtrain.compressors.fewbit_solver import MAX_BITS, Approximation, table
from memtrain.kernels import derivative


def _table(function: str, bits: int) -> Approximation:
    return table(function, bits)


# What torch.compiler.assume_constant_result does, without its import of all of Dynamo (seconds):
# a compiled region takes the table as a constant and does not trace the solver.
vars(_table)["_dynamo_marked_constant"] = True


@dataclass(frozen=True, kw_only=True)
class DerivativeCode:
    """Keeps what an activation's backward pass needs of its input: a code for f'(x).

    `decompress` gives the table's level for f'(x), not x. The table is the solver's best step
    function for f' on [-10, 10], made at first use. `relu` is exact at every width, so that one
    bit serves it; its codes are the same whether taken from its input or its output.

    NaN in x gets code 0, so the gradient there is finite while the forward value is NaN; +-Inf get
    the outermost levels. No element touches another.

    Args:
        bits: 1 to 4 per element.
        function: The activation, a name in `memtrain.kernels.derivative.FUNCTIONS`.

    Raises:
        ValueError: If `bits` or `function` is not allowed.

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

    bits: int = 3
    function: str = "gelu"

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise ValueError(f"bits {self.bits!r} is no integer; allowed: 1 to {MAX_BITS}")
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits {self.bits} is out of range; allowed: 1 to {MAX_BITS}")
        if self.function not in CURVES:
            raise ValueError(f"function {self.function!r} is unknown; allowed: {', '.join(CURVES)}")

    def table(self) -> Approximation:
        """The step function in use.

        Example:
            >>> DerivativeCode(bits=1).table().boundaries
            (0.0,)
        """
        return _table(self.function, self.bits)

    def compress(self, x: Tensor, *, key: Key, previous: Packed | None = None) -> Packed:
        """The codes of `x`, in logical order; no randomness, so `key` and `previous` do nothing."""
        step = self.table()
        codes = derivative.encode(x.detach(), list(step.boundaries), even=step.even)
        return Packed({"codes": codes}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        """The levels that stand for f'(x), contiguous."""
        n = torch.Size(packed.shape).numel()
        levels = list(self.table().levels)
        flat = derivative.decode(packed.tensors["codes"], levels, n, packed.dtype)
        return flat.view(packed.shape)
