"""Cross-entropy's gradient from a log-softmax in min/max groups: contract, reference, dispatch."""

import torch
from torch import Tensor

from memtrain.kernels.dispatch import backend_of, choose, is_plain, register
from memtrain.kernels.group import group

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(x: Tensor, group_size: int) -> bool:
    """Whether one kernel makes the gradient, in less time than the composition.

    Args:
        x: The logits: their device counts.
        group_size: Of the codes.

    Returns:
        True where Triton serves, and groups are whole eights.

    Example:
        >>> fits(torch.ones(2), 256), fits(torch.ones(2).to("meta"), 256)
        (False, False)
    """
    return backend_of(x) == "triton" and group_size % 8 == 0


def softmax_gradient(  # noqa: PLR0913 (a payload's, and a loss's)
    dx: Tensor,
    codes: Tensor,
    bounds: Tensor,
    scale: Tensor,
    classes: Tensor,
    bits: int,
    group_size: int,
    smoothing: float = 0.0,
) -> None:
    """Write `scale * (softmax - target)` of each row, from the codes of its log-softmax.

    `target` is `1 - smoothing` at the row's class and `smoothing / C` besides, everywhere. In
    float32, rounded once: neither the log-softmax nor its exp() is ever there as a tensor.

    Args:
        dx: [rows, C], contiguous, float32, bfloat16 or float16: written.
        codes: Of `group_quantize`, of the log-softmax in row-major order.
        bounds: Of `group_quantize`.
        scale: Factor of each row, float32, [rows].
        classes: int64, [rows], from 0 to C - 1.
        bits: Of the codes.
        group_size: Of the codes.
        smoothing: The share of the uniform distribution in the target.

    Raises:
        TypeError: If a dtype is another one.
        ValueError: If a size does not fit.

    Memory:
        None besides `dx`.

    Example:
        >>> log_softmax = torch.zeros(8).view(1, 8).log_softmax(1)
        >>> dx = torch.empty(1, 8)
        >>> payload = group.group_quantize(log_softmax, 8, 8, stochastic=False, wide=True)
        >>> softmax_gradient(dx, *payload, torch.ones(1), torch.tensor([2]), 8, 8)
        >>> dx.tolist()
        [[0.125, 0.125, -0.875, 0.125, 0.125, 0.125, 0.125, 0.125]]
    """
    run = _gradient if is_plain(dx) else _gradient_op
    run(dx, codes, bounds, scale, classes, bits, group_size, smoothing)


def reference(  # noqa: PLR0913 (a payload's, and a loss's)
    dx: Tensor,
    codes: Tensor,
    bounds: Tensor,
    scale: Tensor,
    classes: Tensor,
    bits: int,
    group_size: int,
    smoothing: float,
) -> None:
    """`softmax_gradient` in plain torch: the definition."""
    saved = group.dequantize_reference(
        codes, bounds, bits, group_size, dx.numel(), torch.float32
    ).view(dx.shape)
    scale, classes = scale.unsqueeze(1), classes.unsqueeze(1)
    wide = saved.exp_().mul_(scale).sub_(scale * (smoothing / dx.shape[1]))
    dx.copy_(wide.scatter_add_(1, classes, scale * (smoothing - 1)))


def _check(
    dx: Tensor, codes: Tensor, bounds: Tensor, scale: Tensor, classes: Tensor, *options: int
) -> None:
    bits, group_size = options[:2]
    if dx.dtype not in DTYPES:
        raise TypeError(f"dx of dtype {dx.dtype}; allowed: float32, bfloat16, float16")
    if dx.dim() != 2 or not dx.is_contiguous():
        raise ValueError(
            f"dx has shape {tuple(dx.shape)} and strides {dx.stride()}; allowed: contiguous rows"
        )
    group._check(bits, group_size, dx.dtype)
    group._check_payload(codes, bounds, bits, group_size, dx.numel())
    for name, x, dtype in (("scale", scale, torch.float32), ("classes", classes, torch.int64)):
        if x.dtype != dtype:
            raise TypeError(f"{name} of dtype {x.dtype}; allowed: {dtype}")
        if x.shape != dx.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {tuple(dx.shape[:1])}")


def _gradient(  # noqa: PLR0913 (a payload's, and a loss's)
    dx: Tensor,
    codes: Tensor,
    bounds: Tensor,
    scale: Tensor,
    classes: Tensor,
    bits: int,
    group_size: int,
    smoothing: float,
) -> None:
    _check(dx, codes, bounds, scale, classes, bits, group_size)
    if choose(dx) != "triton":
        reference(dx, codes, bounds, scale, classes, bits, group_size, smoothing)
        return
    from memtrain.kernels.group import softmax_gradient_triton

    payload = codes.contiguous(), bounds.contiguous()
    rows = scale.contiguous(), classes.contiguous()
    softmax_gradient_triton.gradient(dx, *payload, *rows, bits, group_size, smoothing)


_gradient_op = register(
    "softmax_gradient(Tensor(a!) dx, Tensor codes, Tensor bounds, Tensor scale, Tensor classes,"
    " int bits, int group_size, float smoothing) -> ()",
    _gradient,
    _check,
)
