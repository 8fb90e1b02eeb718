"""CUDA forms of functions that save other tensors on CUDA than on the CPU.

Fake CUDA tensors need a CUDA build of torch, so a step is always simulated on the CPU. Under
`CudaForms` the functions of `CUDA_FORMS` run as on a CUDA device. memtrain's ops ask
`kernels.dispatch` for the simulated device.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from memtrain.activations.saved.known_ops import stand_in
from memtrain.audit.peak.timeline import Phase

CUBLAS = 4096 * 1024 * 2 + 16 * 1024 * 8
"""Bytes of a cuBLAS workspace (`:4096:2:16:8`, torch's default except for `LARGE`)."""
CUBLAS_SM90 = 4096 * 1024 * 8
"""Bytes of a cuBLAS workspace for the capabilities of `LARGE` (`:4096:8`)."""
LARGE = (9, 10, 12)
"""Major compute capabilities, Hopper and Blackwell, with a workspace of 32 MiB."""
FLASH_ROWS = 128
"""Flash attention's backward pads the sequence to a multiple of this."""
BIAS_ALIGNMENT = 8
"""Rows of a bias begin at multiples of this, for the memory-efficient kernel."""
HALVES = (torch.float16, torch.bfloat16)
# torch's documentation, "CUDA Ops that can autocast to float32"; those of the second set take
# float32 as the dtype of their result.
_FLOAT32 = {
    "pow", "rpow", "rdiv", "rtruediv", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
    "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "dist", "erfinv", "exp",
    "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss",
    "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "reciprocal",
    "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softplus", "renorm", "tan",
    "triplet_margin_loss",
}  # fmt: skip
_FLOAT32_RESULT = {"softmax", "log_softmax", "softmin", "cumsum", "cumprod", "prod", "sum"}


def workspaces(device: str) -> dict[Phase, int]:
    """Return the bytes of cuBLAS's workspaces: one for each thread, forward and backward.

    For `cuda` the capability of the current device decides, if there is one.

    Reference:
        torch's aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    large = device == "cuda:sm_90"
    if device == "cuda" and torch.cuda.is_available():
        large = torch.cuda.get_device_capability()[0] in LARGE
    nbytes = CUBLAS_SM90 if large else CUBLAS
    if sizes:  # torch takes their sum, in KiB, on every device
        nbytes = sum(int(size) * int(count) * 1024 for size, count in sizes)
    return {"forward": nbytes, "backward": 2 * nbytes, "step": 2 * nbytes}


class CudaForms(TorchFunctionMode):
    """Runs dropout, attention, group norms and autocast's float32 functions as CUDA does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch function."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
        if name in CUDA_FORMS:
            result = CUDA_FORMS[name](*args, **kwargs)
            if result is not None:
                return result
        if name in _FLOAT32 | _FLOAT32_RESULT and torch.is_autocast_enabled("cpu"):
            return _in_float32(name, func, args, kwargs)
        return func(*args, **kwargs)


def _in_float32(name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    first = args[0] if args else None
    if not isinstance(first, Tensor) or first.dtype not in HALVES:
        return func(*args, **kwargs)
    if name in _FLOAT32_RESULT:
        return func(*args, **{"dtype": torch.float32, **kwargs})
    args, kwargs = tree_map_only(Tensor, lambda x: _widened(x), (args, dict(kwargs)))
    return func(*args, **kwargs)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout with a mask of bools; the CPU saves a mask of floats."""
    if inplace or not training or p in (0, 1) or not isinstance(x, Tensor):
        return None
    return torch.native_dropout(x, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention by a fused kernel, also with dropout or a mask; the CPU uses separate ops."""
    masked = attn_mask is not None and attn_mask.requires_grad
    if masked or query.dim() != 4 or query.dtype == torch.float64:
        return None
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(low) for x in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return _FusedAttention.apply(query, key, value, bias, dropout_p)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the memory-efficient kernel's bias for a mask, which is made in each call.

    cuDNN, which Hopper may use for 16-bit floats, gets the bias without padding.

    Reference:
        torch's aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask and
        preprocess_mask.
    """
    if mask.dtype == torch.bool:
        zero = mask.new_zeros((), dtype=query.dtype)
        mask = torch.where(mask.logical_not(), -math.inf, zero)
    mask = mask.to(query.dtype)  # autocast's
    if mask.stride(-1) != 1 or any(stride % BIAS_ALIGNMENT for stride in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT))[..., :keys]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _results(query: Tensor, key: Tensor, value: Tensor, **_: Tensor | None) -> list[Tensor]:
    batch, heads, rows = query.shape[:-1]
    # [batch, rows, heads, width] in memory, as the kernels write it.
    out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return [out, query.new_empty(batch, heads, rows, dtype=torch.float32)]


class _FusedAttention(torch.autograd.Function):
    """Saves and allocates as flash or memory-efficient attention, without computing."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float
    ) -> Tensor:
        out, sums = _results(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums, bias)
        ctx._saved_dropout_p = dropout_p
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, _, _, _ = ctx.saved_tensors
        batch, heads, rows, width = query.shape
        padded = -(-rows // FLASH_ROWS) * FLASH_ROWS
        buffers = [query.new_empty(batch, heads, padded, dtype=torch.float32)]
        if query.dtype in HALVES:  # the query's gradient is summed in float32
            size = (batch, heads, padded, -(-width // 32) * 32)
            buffers.append(query.new_empty(size, dtype=torch.float32))
        grouped = key.shape[1] != heads  # keys shared by several heads: first a gradient per head
        wide = [x.new_empty(batch, heads, *x.shape[2:]) for x in (key, value) if grouped]
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None
        del buffers, wide  # alive with the gradients
        return result


stand_in(_FusedAttention, _results)


def _group_norm(input: Any, num_groups: int, *args: Any, **options: Any) -> Any:
    """Group norm of a contiguous copy, which is saved: CUDA's kernels have no channels-last."""
    if not isinstance(input, Tensor) or input.is_contiguous():
        return None
    wide = _widened(input) if torch.is_autocast_enabled("cpu") else input
    with CudaForms():
        return torch.group_norm(wide.contiguous(), num_groups, *args, **options)


CUDA_FORMS: Mapping[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
}
"""Name of a torch function -> its CUDA form, which returns None if CUDA equals the CPU."""
