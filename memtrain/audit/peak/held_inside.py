"""Bytes that an op holds on the CPU while it runs, besides its arguments and its results.

A dispatch mode sees an op's results, not what it allocates inside itself and frees before it
returns. So the code that takes it declares it: memtrain's kernels where they are registered
(`kernels.dispatch.register`), torch's ops here. `benchmarks/peaks_everywhere.py` and
`tests/audit/peak/test_held_inside.py` compare what is declared with what an op really allocates.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from memtrain.audit.peak import onednn
from memtrain.kernels.dispatch import INSIDE, INSIDE_CUDA

Held = Callable[[Any, Any, Any], int]
"""Arguments, keyword arguments and result -> bytes."""


def held_inside(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an op on the CPU holds at most besides what is alive when it has run.

    Args:
        func: An op, as a dispatch mode is given it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.

    Returns:
        Bytes; 0 of an op that declares nothing.

    Example:
        >>> x, mask = torch.ones(8), torch.ones(8, dtype=torch.bool)
        >>> held_inside(torch.ops.aten.mul.Tensor, (x, mask), {}, x)  # the mask as float32
        32
    """
    name = func._schema.name
    held = TORCH.get(name)
    if held is not None:
        return held(args, kwargs, result)
    own = INSIDE.get(name)
    return 0 if own is None else own(*args, **kwargs)


def held_on_cuda(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that an op on CUDA holds likewise: memtrain's own, where they declare it.

    Args:
        func: An op, as a dispatch mode is given it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: What it returned.

    Returns:
        Bytes; 0 of torch's ops, of which nothing is known.
    """
    own = INSIDE_CUDA.get(func._schema.name)
    return 0 if own is None else own(*args, **kwargs)


def _casts(args: Any, kwargs: Any, result: Any) -> int:
    """Operands of another dtype than the op computes in are cast first, whole."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
    dtypes = {x.dtype for x in given}
    if len(dtypes) > 1:
        common = reduce(torch.promote_types, dtypes)
    elif dtypes and result.dtype != torch.bool:
        common = torch.promote_types(result.dtype, *dtypes)  # of integers and a float number
    else:
        return 0
    held = sum(x.numel() for x in given if x.dtype != common)
    if given[0].dtype != common and result is given[0]:  # in place: cast back from a result
        held += result.numel()
    return held * common.itemsize


def _chosen(args: Any, kwargs: Any, result: Any) -> int:
    """`where`: its two branches."""
    return _casts(args[1:], kwargs, result)


def _accumulated(args: Any, kwargs: Any, result: Any) -> int:
    """A reduction casts what it reads to the dtype that it adds up in, whole."""
    x, dtype = args[0], result.dtype
    return x.numel() * dtype.itemsize if x.dtype != dtype else 0


def _averaged(args: Any, kwargs: Any, result: Any) -> int:
    """`mean` of 16-bit floats is that of a float32 copy."""
    if args[0].dtype in (torch.float16, torch.bfloat16):
        return 4 * args[0].numel()
    return _accumulated(args, kwargs, result)


def _contiguous(*places: int) -> Held:
    """Those of its arguments that are not contiguous are copied."""

    def held(args: Any, kwargs: Any, result: Any) -> int:
        given = [args[place] for place in places]
        return sum(x.nbytes for x in given if x is not None and not x.is_contiguous())

    return held


def _unfolded(args: Any, kwargs: Any, result: Any) -> int:
    """A copy of the maps, and one that is contiguous where they are not."""
    return args[0].nbytes * (1 if args[0].is_contiguous() else 2)


def _like_first(args: Any, kwargs: Any, result: Any) -> int:
    """As many bytes as what it reads has."""
    return args[0].nbytes


def _mask_of(args: Any, kwargs: Any, result: Any) -> int:
    """A bool for each element."""
    return args[0].numel()


def _unreduced(args: Any, kwargs: Any, result: Any) -> int:
    """A loss is there element by element before it is reduced."""
    whole = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return whole * args[0].element_size() if not result.dim() else 0


def _input_gradient(args: Any, kwargs: Any, result: Any) -> int:
    """Batch norm's backward makes the input's gradient twice, of an input without gaps."""
    dense = not any(map(_gaps, args[:2]))
    return result[0].nbytes if result[0] is not None and dense else 0


def _product(*places: int) -> Held:
    """Operands whose rows or columns are not one after another are copied, matrix by matrix."""

    def held(args: Any, kwargs: Any, result: Any) -> int:
        given = [args[place] for place in places]
        return sum(
            x.shape[-2:].numel() * x.element_size()
            for x in given
            if x.numel() and not _is_matrix(x)
        )

    return held


def _is_matrix(x: Tensor) -> bool:
    """Whether BLAS can read a matrix, or each matrix of a batch, where it lies."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _maps(args: Any, kwargs: Any, result: Any) -> int:
    """Maps that are in neither of the two orders are copied."""
    return _gaps(args[0])


def _gaps(x: Tensor) -> int:
    """Bytes of maps that are in neither order; else 0."""
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    dense = x.is_contiguous() or (x.dim() in (4, 5) and x.is_contiguous(memory_format=form))
    return 0 if dense else x.nbytes


def _gelu_backward(args: Any, kwargs: Any, result: Any) -> int:
    """Copies of what is not in the order of a contiguous input, for oneDNN's kernel."""
    exact = kwargs.get("approximate", "none") == "none"
    if not exact or args[1].dtype != torch.float32 or not args[1].is_contiguous():
        return 0
    return result.nbytes * sum(not x.is_contiguous() for x in (args[0], result))


def _with_logits(args: Any, kwargs: Any, result: Any) -> int:
    """A loss element by element, and a second one where it is reduced."""
    return args[0].nbytes * (1 if result.dim() else 2)


def _resized(args: Any, kwargs: Any, result: Any) -> int:
    """Maps in torch's order are copied channels last, and the result back."""
    return args[0].nbytes + result.nbytes if args[0].is_contiguous() else 0


def _rolled(args: Any, kwargs: Any, result: Any) -> int:
    """One dimension after another."""
    return result.nbytes * max(0, len(args[1]) - 1)


def _complex(args: Any, kwargs: Any, result: Any) -> int:
    return args[0].nbytes if args[0].is_complex() else 0


def _attention(args: Any, kwargs: Any, result: Any) -> int:
    """Scores of a block of queries and keys, and a block of the result, for each thread."""
    query, key = args[:2]
    rows, columns = _split(query.shape[2], key.shape[2])
    return torch.get_num_threads() * 4 * rows * (columns + 2 + query.shape[3])


def _attention_backward(args: Any, kwargs: Any, result: Any) -> int:
    """Two blocks of scores per thread, and a copy of a gradient that is not sample by sample."""
    gradient, query, key = args[:3]
    rows, columns = _split(query.shape[2], key.shape[2])
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return torch.get_num_threads() * 4 * rows * (2 * columns + 1) + copied


def _split(queries: int, keys: int) -> tuple[int, int]:
    """Rows and columns of a block of torch's flash attention for the CPU."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _convolution(args: Any, kwargs: Any, result: Any) -> int:
    return onednn.convolution(*args, **kwargs, y=result)


def _convolution_backward(args: Any, kwargs: Any, result: Any) -> int:
    return onednn.convolution_backward(*args, **kwargs)


def _lstm(args: Any, kwargs: Any, result: Any) -> int:
    return onednn.lstm(*args[:3])


def _lstm_backward(args: Any, kwargs: Any, result: Any) -> int:
    x, weight, recurrent = args[:3]
    return onednn.lstm_backward(x, weight, recurrent, args[10])


_POINTWISE = (
    "add", "sub", "rsub", "mul", "div", "maximum", "minimum", "pow", "addcmul", "addcdiv", "lerp",
    "lt", "le", "gt", "ge", "eq", "ne", "atan2", "fmod", "remainder",
)  # fmt: skip
_MAPS = (
    "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "reflection_pad2d_backward", "grid_sampler_2d_backward",
)  # fmt: skip
TORCH: Mapping[str, Held] = {
    **{f"aten::{name}{suffix}": _casts for name in _POINTWISE for suffix in ("", "_")},
    **{f"aten::{name}": _accumulated for name in ("sum", "prod", "cumsum", "cumprod", "nansum")},
    "aten::linalg_vector_norm": _accumulated,
    "aten::mean": _averaged,
    "aten::where": _chosen,
    "aten::logsumexp": _like_first,
    "aten::_safe_softmax": _mask_of,
    "aten::mse_loss": _unreduced,
    "aten::smooth_l1_loss": _unreduced,
    "aten::huber_loss": _unreduced,
    "aten::binary_cross_entropy": _unreduced,
    "aten::native_layer_norm": _contiguous(0),
    "aten::native_layer_norm_backward": _contiguous(0, 1),
    "aten::embedding_dense_backward": _contiguous(0),
    **{f"aten::{name}": _contiguous(0) for name in ("_softmax", "_log_softmax")},
    **{f"aten::{name}_backward_data": _contiguous(0, 1) for name in ("_softmax", "_log_softmax")},
    **{f"aten::{name}": _maps for name in _MAPS},
    **{f"aten::{name}": _product(0, 1) for name in ("mm", "bmm")},
    **{f"aten::{name}": _product(1, 2) for name in ("addmm", "baddbmm")},
    **{f"aten::upsample_{name}2d": _resized for name in ("nearest", "bilinear", "bicubic")},
    "aten::gelu_backward": _gelu_backward,
    "aten::binary_cross_entropy_with_logits": _with_logits,
    "aten::roll": _rolled,
    "aten::abs": _complex,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::native_batch_norm_backward": _input_gradient,
    "aten::im2col": _unfolded,
    "aten::col2im": _contiguous(0),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
}
"""Name of one of torch's ops -> the bytes that it holds inside."""
