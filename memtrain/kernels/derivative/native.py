"""Few-bit derivative codes in C++ (contract: `derivative.py`).

A small tensor costs what runs around its kernel: what depends on no tensor is found once.
"""

import ctypes
from functools import cache
from typing import cast

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.derivative.definition import (
    BLOCK_SIZE,
    DTYPES,
    PARITIES,
    bits_of,
    check_dtype,
    check_side,
    code_bits,
    numbers,
    wide,
)
from memtrain.kernels.derivative.pointwise import check_function, one_pass, value
from memtrain.kernels.strides import is_dense

# Value and codes in one pass: what equals torch's to the bit.
_FUSED = {"relu": 1, "leaky_relu": 2, "prelu": 2, "hardtanh": 3, "relu6": 3, "clamp": 3, "silu": 4}
_TORCHS_PART = 32768  # torch shares a tensor out among threads in parts of so many elements or more
_TORCHS_RUN = 32  # and works on so many at a time; what is left of a part has another exp()


class _Told(ctypes.Structure):
    """What a kernel is told besides the tensors: `Told` of derivative.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("table", "dtype", "bits", "parity", "function")),
        *((name, ctypes.c_float) for name in ("shift", "a", "b")),
    )


class Encoder:
    """Forward: the codes of tensors of one dtype, and a function's value where one is named."""

    def __init__(
        self,
        function: str,
        parameters: tuple[float, ...],
        boundaries: tuple[float, ...],
        parity: str,
        shift: float,
        dtype: torch.dtype,
    ) -> None:
        check_side(dtype, boundaries, parity)
        if function:
            check_function(function)
        self._function, self._parameters = function, parameters
        self._is_fused = function in _FUSED and dtype != torch.float64
        numbers_of = one_pass(function, parameters, dtype) if self._is_fused else (0.0, 0.0)
        bits, self._table = code_bits(boundaries, parity), numbers(boundaries)
        kind = (DTYPES.index(dtype), bits, PARITIES.index(parity), _FUSED.get(function, 0))
        self._told = _Told(self._table.data_ptr(), *kind, shift, *numbers_of)
        self._at, self._width = ctypes.addressof(self._told), BLOCK_SIZE // 8 * bits
        self._run, self._pack = cpu.packed("mt_derivative_encode", 6)

    def codes(self, x: Tensor, y: int = 0) -> Tensor:
        """The codes of `x`, which is dense, in memory order; the value goes to the address `y`."""
        n = x.numel()
        codes = torch.empty((n + BLOCK_SIZE - 1) // BLOCK_SIZE, self._width, dtype=torch.uint8)
        threads = torch.get_num_threads()
        self._run(self._pack(self._at, x.data_ptr(), y, codes.data_ptr(), n, threads))
        return codes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The value and the codes of `x`, in memory order; of a clone where it is not dense."""
        dense = x if is_dense(x) else x.clone()
        if self._is_fused and (self._function != "silu" or _is_torchs_silu(x)):
            y = torch.empty_like(dense)
            return y, self.codes(dense, y.data_ptr())
        y = value(self._function, x, self._parameters)  # of x: its last bit depends on the strides
        if y.stride() != dense.stride():
            y = torch.empty_like(dense).copy_(y)
        return y, self.codes(dense)


def _is_torchs_silu(x: Tensor) -> bool:
    """Whether one pass gives torch's own SiLU of all of `x`, to the bit."""
    if x.dtype == torch.float32:  # 16 bits do not tell torch's two kinds of exp() apart
        if not is_dense(x):  # torch works on its rows
            return False
        n, threads = x.numel(), torch.get_num_threads()
        parts = max(1, min(threads, (n + _TORCHS_PART - 1) // _TORCHS_PART))
        if n % (parts * _TORCHS_RUN) != 0:
            return False
    return _has_torchs_exp(x.dtype)


@cache
def _has_torchs_exp(dtype: torch.dtype) -> bool:
    """Whether this library's SiLU is torch's to the bit, as torch was built and runs here."""
    if cast(ctypes.CDLL, cpu.library()).mt_isa() == 0:  # without fused multiply-adds: slow
        return False
    x = torch.linspace(-20, 20, 2048, device="cpu").to(dtype)
    y = torch.empty_like(x)
    encoder("silu", (), (0.0,), "plain", 0.0, dtype).codes(x, y.data_ptr())
    return torch.equal(y, value("silu", x))


class Decoder:
    """Backward: the levels of tensors of one dtype, times gradients."""

    def __init__(self, levels: tuple[float, ...], dtype: torch.dtype) -> None:
        check_dtype(dtype)
        self._table = numbers(levels, wide(dtype))
        kind = (DTYPES.index(dtype), bits_of(len(levels), 0), 0, 0)
        self._told = _Told(self._table.data_ptr(), *kind, 0.0, 0.0, 0.0)
        self._at = ctypes.addressof(self._told)
        self._run, self._pack = cpu.packed("mt_derivative_decode", 6)

    def backward(self, grad: Tensor, codes: Tensor) -> Tensor:
        """`grad` times the level of each code; both in memory order."""
        return self.write(grad, codes, torch.empty_like(grad))

    def write(self, grad: Tensor | None, codes: Tensor, out: Tensor) -> Tensor:
        """The levels, times `grad` where there is one, written to `out`."""
        at, threads = 0 if grad is None else grad.data_ptr(), torch.get_num_threads()
        codes_at, out_at, n = codes.data_ptr(), out.data_ptr(), out.numel()
        self._run(self._pack(self._at, at, codes_at, out_at, n, threads))
        return out


encoder = cache(Encoder)
decoder = cache(Decoder)
