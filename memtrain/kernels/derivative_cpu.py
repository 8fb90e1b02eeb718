"""Few-bit derivative codes in C++ (contract: `derivative.py`).

A small tensor costs what runs around its kernel: what depends on no tensor is found once.
"""

import ctypes
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.derivative_reference import (
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
from memtrain.kernels.pointwise import check_function, one_pass, value
from memtrain.kernels.strides import is_dense

# Value and codes in one pass: what equals torch's to the bit.
_FUSED = {"relu": 1, "leaky_relu": 2, "prelu": 2, "hardtanh": 3, "relu6": 3, "clamp": 3, "silu": 4}
_TORCHS_PART = 32768  # torch shares a tensor out among threads in parts of so many elements or more
_TORCHS_RUN = 32  # and works on so many at a time; what is left of a part has another exp()


class _Plan(NamedTuple):
    """What the kernel is told besides the tensors."""

    table: Tensor  # kept alive, for `address` is its
    address: int
    width: int  # bytes of a block's codes
    numbers: tuple[int | float, ...]


@cache
def _forward_plan(
    function: str,
    parameters: tuple[float, ...],
    boundaries: tuple[float, ...],
    side: tuple[str, float],
    dtype: torch.dtype,
) -> _Plan:
    """For codes alone, or with the value of a function in `_FUSED`."""
    parity, shift = side
    check_side(dtype, boundaries, parity)
    a, b = one_pass(function, parameters, dtype) if function else (0.0, 0.0)
    kernel = (_FUSED.get(function, 0), float(a), float(b))
    table, bits = numbers(boundaries), code_bits(boundaries, parity)
    told = (DTYPES.index(dtype), bits, PARITIES.index(parity), float(shift), *kernel)
    return _Plan(table, table.data_ptr(), BLOCK_SIZE // 8 * bits, told)


def _is_fused(function: str, x: Tensor) -> bool:
    """Whether one pass gives the codes and torch's own value of all of `x`."""
    if function not in _FUSED or x.dtype == torch.float64:
        return False
    if function != "silu":
        return True
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
    _codes(x, y.data_ptr(), _forward_plan("silu", (), (0.0,), ("plain", 0.0), dtype))
    return torch.equal(y, value("silu", x))


@cache
def _levels_plan(levels: tuple[float, ...], dtype: torch.dtype) -> _Plan:
    check_dtype(dtype)
    bits, table = bits_of(len(levels), 0), numbers(levels, wide(dtype))
    return _Plan(table, table.data_ptr(), BLOCK_SIZE // 8 * bits, (DTYPES.index(dtype), bits))


def _codes(x: Tensor, y: int, plan: _Plan) -> Tensor:
    n = x.numel()
    codes = torch.empty((n + BLOCK_SIZE - 1) // BLOCK_SIZE, plan.width, dtype=torch.uint8)
    addresses = (x.data_ptr(), y, plan.address, codes.data_ptr())
    cpu.call_raw("mt_derivative_forward", *addresses, n, *plan.numbers)
    return codes


def encode(x: Tensor, boundaries: tuple[float, ...], side: tuple[str, float]) -> Tensor:
    """The codes of `x`, which is dense, in memory order; `side` is its parity and shift."""
    return _codes(x, 0, _forward_plan("", (), boundaries, side, x.dtype))


def forward(
    x: Tensor,
    function: str,
    parameters: tuple[float, ...],
    boundaries: tuple[float, ...],
    side: tuple[str, float],
) -> tuple[Tensor, Tensor]:
    """The value and the codes of `x`, in memory order; where it is not dense, that of a clone."""
    check_function(function)
    dense = x if is_dense(x) else x.clone()
    if _is_fused(function, x):
        plan = _forward_plan(function, parameters, boundaries, side, x.dtype)
        y = torch.empty_like(dense)
        return y, _codes(dense, y.data_ptr(), plan)
    plan = _forward_plan("", (), boundaries, side, x.dtype)
    y = value(function, x, parameters)  # of x itself: torch's last bit depends on the strides
    if y.stride() != dense.stride():
        y = torch.empty_like(dense).copy_(y)
    return y, _codes(dense, 0, plan)


def backward(grad: Tensor | None, codes: Tensor, levels: tuple[float, ...], out: Tensor) -> Tensor:
    """The levels, times `grad` where there is one, written to `out`."""
    plan = _levels_plan(levels, out.dtype)
    addresses = (0 if grad is None else grad.data_ptr(), codes.data_ptr(), plan.address)
    cpu.call_raw("mt_derivative_backward", *addresses, out.data_ptr(), out.numel(), *plan.numbers)
    return out
