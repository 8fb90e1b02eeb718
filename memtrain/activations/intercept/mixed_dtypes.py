"""Ops of a model with weights of two bytes that torch cannot run on the dtypes they are given."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.activations.saved.aliases import callables

# Run in the weights' dtype, as autocast does.
_LOWERED = """
linear bilinear matmul __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm einsum tensordot
chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
convolution scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell prelu
"""
LOWERED = callables(*_LOWERED.split())
STATISTICS = callables("batch_norm", "instance_norm")
"""Functions that write to running statistics without a new version."""

Run = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def run_mixed(
    run: Run,
    low: torch.dtype,
    function: Any,
    module: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an op as it is; where torch refuses its dtypes, run it as autocast would.

    float32 beside weights of two bytes: matrix products and convolutions take the weights' dtype,
    all other ops float32. An op that does not know the weights' dtype (`avg_pool3d` on a CPU,
    `torch.fft`) runs in float32, and its result is rounded to it. What an op writes to a cast
    argument is copied to the argument: an op in place keeps its dtype.

    An error that stays is torch's own, with a note of the module and the fix where dtypes are
    mixed.

    Example:
        >>> run = lambda args, kwargs: torch.mm(*args)
        >>> halves, ones = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2)
        >>> run_mixed(run, torch.bfloat16, torch.mm, "", (ones, halves), {}).dtype
        torch.bfloat16
    """
    try:
        return run(args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        found = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if low not in found:
            raise
        mixed = torch.float32 in found
        to = low if mixed and function in LOWERED else torch.float32
        try:
            result = _run_cast(run, low, to, function, args, kwargs)
        except RuntimeError:
            if mixed:
                error.add_note(
                    f"memtrain: {function.__name__} of module {module!r} is given float32 "
                    f"beside weights of {low}: cast there, or use weights=keep"
                )
            raise error from None
    if mixed:
        return result
    return tree_map_only(Tensor, lambda x: x.to(low) if x.dtype == torch.float32 else x, result)


def _run_cast(
    run: Run,
    low: torch.dtype,
    to: torch.dtype,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an op on casts of its arguments; copy back what it writes to them."""
    casts: list[tuple[Tensor, Tensor, int]] = []  # argument, its cast, the cast's version

    def cast(x: Tensor) -> Tensor:
        if x.dtype == to or x.dtype not in (low, torch.float32):
            return x
        casts.append((x, y := _cast(x, to), y._version))
        return y

    result = run(*tree_map_only(Tensor, cast, (args, kwargs)))
    written: dict[int, Tensor] = {}
    for x, y, version in casts:
        is_statistic = function in STATISTICS and x.dim() == 1 and not x.requires_grad
        if y._version != version or is_statistic:
            written[id(y)] = x.copy_(y)
    return tree_map_only(Tensor, lambda y: written.get(id(y), y), result)


def _cast(x: Tensor, to: torch.dtype) -> Tensor:
    """Return a copy with a version counter."""
    if not torch.is_inference_mode_enabled():
        return x.to(to)
    with torch.inference_mode(False), torch.no_grad():
        return x.to(to)
