"""Layer and RMS norm and the quantised normalised input in one pass: contract, reference, dispatch.

The composition (torch's norm, the norm again without weights, `group_quantize`) reads x twice and
writes and reads a tensor of its size besides. On a CPU it is no slower.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.dispatch import backend_of, choose, copies, is_plain, register
from memtrain.kernels.group import group
from memtrain.kernels.random.philox import signed

MAX_ROW = 16384
"""The longest row, which stays in a GPU's cache after its first read."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Codes = tuple[int, int, int, bool]
"""Arguments of `group_quantize` for x_hat: bits, group size, seed, stochastic."""


def fits(x: Tensor, size: int, group_size: int) -> bool:
    """Return whether `norm_quantize` has a kernel for rows of `size` elements.

    Rows must be whole groups of at most `MAX_ROW` elements, the group size a multiple of 8, and `x`
    contiguous with a dtype of the kernel and its device a GPU.
    """
    whole = 0 < size <= MAX_ROW and size % group_size == 0 and group_size % 8 == 0
    if not whole or x.numel() == 0 or not x.is_contiguous():
        return False
    return x.dtype in _DTYPES and backend_of(x) == "triton"


def norm_quantize(  # noqa: PLR0913 (the norm's own, and the quantiser's)
    x: Tensor,
    size: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    centred: bool = True,
    narrow: bool = False,
    codes: Codes = (4, 256, 0, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise the rows of `x`, and quantise `x_hat` without storing it.

    In float32, for each row: `mean = sum(x) / size` (0 unless `centred`), `d = x - mean`, `rstd = 1
    / sqrt(sum(d * d) / size + eps)`, `x_hat = d * rstd`, `y = x_hat * weight + bias`. Triton adds
    in another order than the reference. A NaN or an Inf makes its own row NaN. With `narrow`, x_hat
    is rounded to the dtype of `x` before the product, as in Llama's norm.

    Returns:
        y: Shape and dtype of `x`.
        rstd: float32, [rows].
        codes: Codes of `group_quantize(x_hat, *codes)`, with the float32 x_hat.
        bounds: Bounds of `group_quantize(x_hat, *codes)`.

    Example:
        >>> x = torch.tensor([[1.0, 3.0, 1, 3, 1, 3, 1, 3]])
        >>> y, rstd, *_ = norm_quantize(x, 8, eps=0.0, codes=(4, 8, 0, True))
        >>> y.tolist(), rstd.tolist()
        ([[-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]], [1.0])
    """
    run = _norm if is_plain(x) else _norm_op
    bits, group_size, seed, *how = codes
    options = (eps, centred, narrow, bits, group_size, signed(seed), *how)
    return run(x, size, weight, bias, *options)


def reference(  # noqa: PLR0913 (the norm's own, and the quantiser's)
    x: Tensor,
    size: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    centred: bool,
    narrow: bool,
    codes: Codes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `norm_quantize` in plain torch with float32 weight and bias: the definition."""
    rows = x.reshape(-1, size).float()
    d = rows - rows.mean(1, keepdim=True) if centred else rows
    mean_square = d.square().mean(1, keepdim=True) + eps
    # float32's root through float64: torch's vectorised float32 roots are off by a last place.
    rstd = 1.0 / mean_square.double().sqrt().float()
    x_hat = d * rstd
    value = x_hat.to(x.dtype).float() if narrow else x_hat
    y = (value * weight + bias).to(x.dtype)
    packed, bounds = group.quantize_reference(x_hat, *codes)
    return y.view(x.shape), rstd.view(-1), packed, bounds


def _check(x: Tensor, size: int, parameters: Sequence[Tensor | None], group_size: int) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"dtype {x.dtype}; allowed: float32, bfloat16, float16")
    if not 0 < size <= MAX_ROW or size % group_size:
        raise ValueError(
            f"size={size}; allowed: multiples of group_size={group_size} up to {MAX_ROW}"
        )
    if x.numel() % size or not x.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}; allowed: contiguous rows of "
            f"{size} elements"
        )
    for name, parameter in zip(("weight", "bias"), parameters, strict=True):
        if parameter is not None and parameter.numel() != size:
            raise ValueError(f"{name} of {parameter.numel()} elements; allowed: {size}")


def _empty(
    x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = options[3:]  # the first are eps, centred and narrow
    _check(x, size, (weight, bias), codes[1])
    rstd = x.new_empty(x.numel() // size, dtype=torch.float32)
    return torch.empty_like(x), rstd, *group._empty(x, *codes)


def _norm(
    x: Tensor,
    size: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    narrow: bool,
    *codes: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flags = (eps, centred, narrow)
    y, rstd, packed, bounds = _empty(x, size, weight, bias, *flags, *codes)
    weight = x.new_ones(size, dtype=torch.float32) if weight is None else _flat(weight)
    bias = x.new_zeros(size, dtype=torch.float32) if bias is None else _flat(bias)
    if choose(x) != "triton":
        return reference(x, size, weight, bias, *flags, codes)
    from memtrain.kernels.norm import norm_triton

    norm_triton.quantize(x, weight, bias, y, rstd, packed, bounds, size, *flags, codes)
    return y, rstd, packed, bounds


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1).float()


def _parameters_on_cuda(
    x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> int:
    """Return the bytes of float32 weight and bias, or of ones and zeros."""
    return sum(4 * size if t is None else copies(t, torch.float32) for t in (weight, bias))


_norm_op = register(
    "norm_quantize(Tensor x, int size, Tensor? weight, Tensor? bias, float eps, bool centred,"
    " bool narrow, int bits, int group_size, int seed, bool stochastic)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _norm,
    _empty,
    inside_cuda=_parameters_on_cuda,
)
