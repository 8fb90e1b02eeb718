"""Dropout that saves its mask at one bit per element."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.ops.autograd import autograd_function
from memtrain.activations.ops.call import Call, is_lossy
from memtrain.activations.saved.known_ops import DROPOUT
from memtrain.kernels.derivative import derivative
from memtrain.kernels.dispatch import is_for_cuda
from memtrain.kernels.packing.pack import BLOCK, pack_codes
from memtrain.kernels.strides import in_order, is_dense, memory_order


def recognise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """`F.dropout` and `torch.dropout` in training, out of place; None otherwise."""
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    training = values.pop("train", values.get("training", True))
    x, p = values.get("input"), values.get("p", 0.5)
    if not isinstance(x, Tensor) or not training or values.get("inplace") or not 0 < p < 1:
        return None
    if name.endswith("_") or x.dtype not in derivative.DTYPES:
        return None
    # The mask is packed without loss, whatever the compressor; torch's own random stream draws it.
    return Call("dropout", x, lambda compressor, key: dropout(x, float(p)), is_lossy, "saved")


def _dropout_forward(ctx: Any, x: Tensor, p: float) -> Tensor:
    x = x if is_dense(x) else x.clone()
    # Each device draws as its own F.dropout does, so the random stream is plain PyTorch's.
    on_cuda = is_for_cuda(x)
    if on_cuda:
        y, mask = torch.native_dropout(x, p, True)
    else:
        y, mask = None, torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    flat = mask if mask.is_contiguous() else memory_order(mask)
    packed, factor = pack_codes(flat.view(torch.uint8), 1), _factor(p, x.dtype, on_cuda)
    ctx.save_for_backward(packed)
    ctx.scaling = factor, x.shape, x.stride()
    ctx.mask = partial(_masked, *ctx.scaling)
    return _scaled(x, packed, factor) if y is None else y


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
    (packed,), (factor, shape, stride) = ctx.saved_tensors, ctx.scaling
    if torch.is_grad_enabled():  # a product that can be differentiated again
        return (grad * _scaled(in_order(torch.ones_like(grad), shape, stride), packed, factor),)
    return (_masked(factor, shape, stride, packed, grad),)


dropout = autograd_function(_dropout_forward, _dropout_backward, twice=True, like=DROPOUT)
"""`F.dropout(x, p)` in training, bit for bit, saving one bit per element for backward.

Args:
    x: float32, bfloat16, float16 or float64, any shape.
    p: Probability of a zero, in (0, 1).

Memory:
    1/8 byte per element saved (torch: 4 on a CPU, 1 on CUDA).
"""


def _masked(
    factor: float, shape: torch.Size, stride: tuple[int, ...], packed: Tensor, x: Tensor
) -> Tensor:
    return _scaled(in_order(x, shape, stride), packed, factor)


def _scaled(x: Tensor, packed: Tensor, factor: float) -> Tensor:
    # A mask is a code of one bit, and the levels are 0 and the factor.
    return derivative.backward(x, packed.view(-1, BLOCK // 8), (0.0, factor))


@cache
def _factor(p: float, dtype: torch.dtype, on_cuda: bool) -> float:
    """1 / (1 - p) as torch rounds it: CUDA's kernels compute in float32, the CPU in the dtype."""
    if on_cuda:
        return 1 / (1 - p)
    return float(torch.tensor(1.0, dtype=dtype, device="cpu") / (1 - p))
