"""Layer and RMS norm and the quantised normalised input in one pass: contract, reference, dispatch.

The composition (torch's norm, the norm again without weights, `group_quantize`) reads x twice and
writes and reads a tensor of its size besides.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend_of, choose, copies, is_plain, register
from memtrain.kernels.group import group
from memtrain.kernels.random.philox import signed

LANES = 32
"""A row's sum has this many running sums, which are then added by halves."""
MAX_ROW = 16384
"""The longest row, which stays in the cache of a CPU core or GPU after its first read."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Codes(NamedTuple):
    """The quantiser of the normalised input: arguments of `group_quantize`."""

    bits: int = 4
    group_size: int = 256
    seed: int = 0
    stochastic: bool = True
    wide: bool = False


_KNOWN = {"cpu": (torch.float32, torch.bfloat16), "triton": _DTYPES}


def fits(x: Tensor, size: int, group_size: int) -> bool:
    """Return whether `norm_quantize` has a kernel for a call.

    Args:
        x: The norm's input.
        size: Elements of a row.
        group_size: The group size of the quantiser.

    Returns:
        True if rows are whole groups of at most `MAX_ROW` elements, the group size is a multiple of
        8, `x` is contiguous, and its device has a kernel for its dtype.

    Example:
        >>> fits(torch.ones(4, 512), 512, 256), fits(torch.ones(4, 48), 48, 256)
        (True, False)
    """
    whole = 0 < size <= MAX_ROW and size % group_size == 0 and group_size % 8 == 0
    if not whole or x.numel() == 0 or not x.is_contiguous():
        return False
    return x.dtype in _KNOWN.get(backend_of(x), ())


def norm_quantize(  # noqa: PLR0913 (the norm's own, and the quantiser's)
    x: Tensor,
    size: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    centred: bool = True,
    narrow: bool = False,
    codes: Codes = Codes(),  # noqa: B008 (a frozen value)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise the rows of `x`, and quantise `x_hat` without storing it.

    In float32, for each row: `mean = sum(x) / size` (0 unless `centred`), `d = x - mean`,
    `rstd = 1 / sqrt(sum(d * d) / size + eps)`, `x_hat = d * rstd`, `y = x_hat * weight + bias`.
    The reference and the C++ kernel add in the same order (`LANES`) and are equal; Triton adds in
    another order. A NaN or an Inf makes its own row NaN.

    Args:
        x: float32, bfloat16 or float16, contiguous, rows of `size` elements.
        size: Elements of a row, a multiple of the group size, at most `MAX_ROW`.
        weight: [size], or None for ones.
        bias: [size], or None for zeros.
        eps: Added to the mean square.
        centred: Whether this is layer norm, else RMS norm.
        narrow: Whether x_hat is rounded to the dtype of `x` before the product, as in Llama's norm.
        codes: The quantiser of the float32 x_hat.

    Returns:
        y: Shape and dtype of `x`.
        rstd: float32, [rows].
        codes: Codes of `group_quantize(x_hat)`.
        bounds: Bounds of `group_quantize(x_hat)`.

    Raises:
        TypeError: If `x` has another dtype.
        ValueError: If a size does not fit, or the seed of `codes` has more than 64 bits.
    Memory:
        bits / 8 + 4 / group_size bytes per element, 4 per row, and y.

    Example:
        >>> x = torch.tensor([[1.0, 3.0, 1, 3, 1, 3, 1, 3]])
        >>> y, rstd, *_ = norm_quantize(x, 8, eps=0.0, codes=Codes(group_size=8))
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
    mean = _sums(rows) / size if centred else 0.0
    d = rows - mean
    mean_square = _sums(d * d) / size + eps
    # float32's root through float64: torch's vectorised float32 roots are off by a last place.
    rstd = 1.0 / mean_square.double().sqrt().float()
    x_hat = d * rstd
    value = x_hat.to(x.dtype).float() if narrow else x_hat
    y = (value * weight + bias).to(x.dtype)
    packed, bounds = group.quantize_reference(
        x_hat, codes.bits, codes.group_size, codes.seed, codes.stochastic, codes.wide
    )
    return y.view(x.shape), rstd.view(-1), packed, bounds


def _sums(rows: Tensor) -> Tensor:
    """Return each row's sum, in the order of the C++ kernel: [rows, 1]."""
    lanes = F.pad(rows, (0, -rows.shape[1] % LANES)).unflatten(1, (-1, LANES))
    total = torch.zeros_like(lanes[:, 0])
    for k in range(lanes.shape[1]):
        total = total + lanes[:, k]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


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
    codes = Codes(*options[3:])  # the first are eps, centred and narrow
    _check(x, size, (weight, bias), codes.group_size)
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
    *options: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = Codes(*options)  # pyright: ignore[reportArgumentType]
    flags = (eps, centred, narrow)
    y, rstd, packed, bounds = _empty(x, size, weight, bias, *flags, *codes)
    weight = x.new_ones(size, dtype=torch.float32) if weight is None else _flat(weight)
    bias = x.new_zeros(size, dtype=torch.float32) if bias is None else _flat(bias)
    chosen = choose(x)
    if chosen == "reference":
        return reference(x, size, weight, bias, *flags, codes)
    if chosen == "triton":
        from memtrain.kernels.norm import norm_triton

        norm_triton.quantize(x, weight, bias, y, rstd, packed, bounds, size, *flags, codes)
        return y, rstd, packed, bounds
    wide = x if x.dtype == torch.bfloat16 else x.float()
    out = y if y.dtype == wide.dtype else torch.empty_like(wide)
    if narrow and out is not y:
        raise TypeError("float16 with narrow=True; allowed on the CPU: bfloat16, float32")
    sizes = (rstd.numel(), size, float(eps), centred, narrow)
    bounds_of = (packed, bounds, codes.wide, *codes[:-1])
    is_bf16 = wide.dtype == torch.bfloat16
    cpu.call("mt_norm_quantize", wide, is_bf16, weight, bias, out, rstd, *sizes, *bounds_of)
    return y if out is y else y.copy_(out), rstd, packed, bounds


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1).float()


def _parameters_on_cuda(
    x: Tensor, size: int, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> int:
    """Return the bytes of float32 weight and bias, or of ones and zeros."""
    return sum(4 * size if t is None else copies(t, torch.float32) for t in (weight, bias))


_norm_op = register(
    "norm_quantize(Tensor x, int size, Tensor? weight, Tensor? bias, float eps, bool centred,"
    " bool narrow, int bits, int group_size, int seed, bool stochastic, bool wide)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _norm,
    _empty,
    inside=lambda x, *options: 2 * copies(x, torch.float32, torch.bfloat16),  # of y too
    inside_cuda=_parameters_on_cuda,
)
