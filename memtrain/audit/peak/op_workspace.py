"""Bytes that an op on the CPU allocates and frees while it runs.

A dispatch mode sees only the results of an op. Kernels of memtrain declare these bytes at their
registration (`kernels.dispatch.register`); torch's ops are declared here. If the bytes depend on a
library and the processor (`COUNTED`: convolutions, norms, losses), the op runs once on zeros in a
separate thread, and its allocations are counted. `benchmarks/peaks.py` and
`tests/audit/peak/test_held_inside.py` compare declared and real bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memtrain.activations.trace.rnn_workspace import GATES, row_nbytes
from memtrain.audit.allocations import Allocations
from memtrain.kernels.dispatch import INSIDE, INSIDE_CUDA

SAMPLE = 16 * 2**20
"""For larger inputs, the op runs with fewer samples, and its bytes are extrapolated."""


def workspace_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the most bytes that an op on the CPU allocates and frees while it runs, or 0.

    Example:
        >>> x, mask = torch.ones(8), torch.ones(8, dtype=torch.bool)
        >>> workspace_of(torch.ops.aten.mul.Tensor, (x, mask), {}, x)  # the mask as float32
        32
    """
    name = func._schema.name
    if name in COUNTED:
        return _counted(func, args, kwargs, result, COUNTED[name])
    if name in TORCH:
        return TORCH[name](args, kwargs, result)
    return INSIDE[name](*args, **kwargs) if name in INSIDE else 0


def cuda_workspace_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return these bytes for an op on CUDA; 0 for torch's ops, which are unknown."""
    declared = INSIDE_CUDA.get(func._schema.name)
    return 0 if declared is None else declared(*args, **kwargs)


def _casts(args: Any, kwargs: Any, result: Any) -> int:
    """Copies of operands in the dtype of the computation."""
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
    dtypes = {x.dtype for x in operands}
    if len(dtypes) > 1:
        common = reduce(torch.promote_types, dtypes)
    elif dtypes and result.dtype != torch.bool:
        common = torch.promote_types(result.dtype, *dtypes)  # of integers and a float number
    else:
        return 0
    count = sum(x.numel() for x in operands if x.dtype != common)
    if operands[0].dtype != common and result is operands[0]:  # in place: cast back from a result
        count += result.numel()
    return count * common.itemsize


def _accumulated(args: Any, kwargs: Any, result: Any) -> int:
    """A copy of a reduction's input in the accumulation dtype."""
    x, dtype = args[0], result.dtype
    return x.numel() * dtype.itemsize if x.dtype != dtype else 0


def _averaged(args: Any, kwargs: Any, result: Any) -> int:
    """A float32 copy for the mean of 16-bit floats."""
    if args[0].dtype in (torch.float16, torch.bfloat16):
        return 4 * args[0].numel()
    return _accumulated(args, kwargs, result)


def _product(positions: Sequence[int], args: Any, kwargs: Any, result: Any) -> int:
    """Copies, one matrix at a time, of operands that BLAS cannot read."""
    operands = [args[position] for position in positions if args[position].numel()]
    return sum(x.shape[-2:].numel() * x.element_size() for x in operands if not _is_matrix(x))


def _is_matrix(x: Tensor) -> bool:
    """Return whether BLAS can read a matrix, or each matrix of a batch, without a copy."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _attention(args: Any, kwargs: Any, result: Any) -> int:
    """Scores of a block of queries and keys, and a block of the result, for each thread."""
    query, key = args[:2]
    rows, columns = _split(query.shape[2], key.shape[2])
    return torch.get_num_threads() * 4 * rows * (columns + 2 + query.shape[3])


def _attention_backward(args: Any, kwargs: Any, result: Any) -> int:
    """Two blocks of scores per thread, and a copy of a gradient that is not contiguous."""
    gradient, query, key = args[:3]
    rows, columns = _split(query.shape[2], key.shape[2])
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return torch.get_num_threads() * 4 * rows * (2 * columns + 1) + copied


def _split(queries: int, keys: int) -> tuple[int, int]:
    """Rows and columns of a block of torch's flash attention for the CPU."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _counted(func: Any, args: Any, kwargs: Any, result: Any, batched: Sequence[int]) -> int:
    """Count the bytes of a run on zeros; extrapolate linearly if there are too many samples."""
    samples = len(args[0]) if args[0].dim() else 1
    tensors = [x for x in (*(args[k] for k in batched), *tree_leaves(result)) if torch.is_tensor(x)]
    most = max(x.nbytes for x in tensors) // max(1, samples)
    if not most:
        return 0

    def run(count: int) -> int:
        fewer = {samples: count}
        inputs = tuple(_metadata(x, fewer if k in batched else {}) for k, x in enumerate(args))
        named = tuple((name, _metadata(x, fewer)) for name, x in kwargs.items())
        # The last two choose among kernels.
        return _run(func, inputs, named, torch.get_num_threads(), torch.backends.mkldnn.enabled)

    count = max(1, min(samples, SAMPLE // most))
    nbytes, less = run(count), count - max(1, count // 4)  # few samples may need other buffers
    if count < samples:
        slope = (nbytes - run(less)) / (count - less) if less else nbytes
        nbytes += int((samples - count) * slope)
    return nbytes


def _metadata(x: Any, fewer: Mapping[int, int]) -> Any:
    """Return an argument as a cache key, a tensor as shape, stride and dtype.

    `fewer` maps the number of samples to a smaller one.
    """
    if not isinstance(x, Tensor | list):
        return x
    whole = (*(x.shape if isinstance(x, Tensor) else x),)
    shape = (*(fewer.get(n, n) for n in whole[:1]), *whole[1:])
    return (shape, x.stride(), x.dtype) if isinstance(x, Tensor) else shape


@cache
def _run(func: Any, inputs: Any, kwargs: Any, threads: int, mkldnn: bool) -> int:
    """Run an op on zeros, and return the bytes that it allocates besides its result."""

    def run() -> int:
        args = [_zeros(x) for x in inputs]
        named = {name: _zeros(x) for name, x in kwargs}
        with Allocations(torch.device("cpu")) as live:
            _result = func(*args, **named)
            return live.peak_nbytes - live.nbytes()

    with ThreadPoolExecutor(1) as thread:  # without the modes and the profiler of this thread
        return thread.submit(run).result()


def _zeros(x: Any) -> Any:
    """Allocate a tensor from its metadata; return other arguments."""
    if not (isinstance(x, tuple) and x and isinstance(x[-1], torch.dtype)):
        return x
    shape, stride, dtype = x
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return torch.zeros(last + 1, dtype=dtype).as_strided(shape, stride)


def _lstm(args: Any, kwargs: Any, result: Any) -> int:
    """The gates of all steps, and the weights in oneDNN's layout."""
    x, weight, recurrent = args[:3]
    gates = row_nbytes(GATES * recurrent.shape[1], x.element_size()) * x.shape[:2].numel()
    return gates + weight.nbytes + recurrent.nbytes


def _lstm_backward(args: Any, kwargs: Any, result: Any) -> int:
    """As `_lstm`, with the weights' gradients, and a copy of a gradient with gaps."""
    dy = args[10]
    copied = 0 if dy is None or dy.is_contiguous() else dy.nbytes
    return _lstm(args, kwargs, result) + args[1].nbytes + args[2].nbytes + copied


def _copied(args: Any, kwargs: Any, result: Any) -> int:
    """A contiguous copy of an input with gaps."""
    return 0 if args[0].is_contiguous() else args[0].nbytes


_SOFTMAX, _UPSAMPLED = ("_softmax", "_log_softmax"), ("nearest", "bilinear", "bicubic")
_POINTWISE = (
    "add", "sub", "rsub", "mul", "div", "maximum", "minimum", "pow", "addcmul", "addcdiv", "lerp",
    "lt", "le", "gt", "ge", "eq", "ne", "atan2", "fmod", "remainder",
)  # fmt: skip


TORCH: Mapping[str, Callable[[Any, Any, Any], int]] = {
    **{f"aten::{name}{suffix}": _casts for name in _POINTWISE for suffix in ("", "_")},
    **{f"aten::{name}": _accumulated for name in ("sum", "prod", "cumsum", "cumprod", "nansum")},
    "aten::linalg_vector_norm": _accumulated,
    "aten::mean": _averaged,
    "aten::where": lambda args, kwargs, result: _casts(args[1:], kwargs, result),
    "aten::embedding_dense_backward": _copied,
    **{f"aten::{name}": partial(_product, (0, 1)) for name in ("mm", "bmm")},
    **{f"aten::{name}": partial(_product, (1, 2)) for name in ("addmm", "baddbmm")},
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
}
"""Name of one of torch's ops -> its bytes, from arguments and result."""
COUNTED: Mapping[str, Sequence[int]] = {
    **{f"aten::{name}": (0,) for name in ("convolution", "im2col", "col2im", "roll", "abs")},
    **{f"aten::{name}": (0,) for name in (*_SOFTMAX, "_safe_softmax", "logsumexp")},
    **{f"aten::{name}_backward_data": (0, 1) for name in _SOFTMAX},
    **{f"aten::{name}_loss": (0, 1) for name in ("mse", "smooth_l1", "huber")},
    **{f"aten::binary_cross_entropy{suffix}": (0, 1) for suffix in ("", "_with_logits")},
    "aten::native_layer_norm": (0,),
    "aten::native_layer_norm_backward": (0, 1, 3, 4),
    "aten::native_batch_norm_backward": (0, 1),
    "aten::convolution_backward": (0, 1),
    "aten::gelu_backward": (0, 1),
    "aten::reflection_pad2d_backward": (0, 1),
    "aten::grid_sampler_2d_backward": (0, 1, 2),
    **{f"aten::max_pool{n}d_with_indices_backward": (0, 1, 7) for n in (2, 3)},
    **{f"aten::upsample_{name}2d": (0,) for name in _UPSAMPLED},
    **{f"aten::upsample_{name}2d_backward": (0, 2) for name in _UPSAMPLED},  # and its input's size
}
"""Name of one of torch's ops -> its arguments with a batch dimension; its bytes are counted."""
