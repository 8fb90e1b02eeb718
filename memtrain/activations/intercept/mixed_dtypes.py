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
    ops in place that of what they change, all others float32. An op that does not know the weights'
    dtype (`avg_pool3d` on a CPU, `torch.fft`) runs in float32, and its result is rounded to it.

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
        to = None if "out" in kwargs else _dtype(low, function, args, found)
        if to is None:
            raise
        try:
            result = run(*tree_map_only(Tensor, lambda x: _cast(x, low, to), (args, kwargs)))
        except RuntimeError:
            if torch.float32 in found:
                error.add_note(
                    f"memtrain: {function.__name__} of module {module!r} is given float32 "
                    f"beside weights of {low}: cast there, or use weights=keep"
                )
            raise error from None
    if torch.float32 in found:
        return result
    return tree_map_only(Tensor, lambda x: _cast(x, low, low), result)


def _dtype(
    low: torch.dtype, function: Any, args: Sequence[Any], found: set[torch.dtype]
) -> torch.dtype | None:
    """Return the dtype to try in place of those that are there; None: there is none."""
    if low not in found:
        return None
    name = getattr(function, "__name__", "")
    plain = name.startswith("__") and not name.startswith(("__i", "__setitem__"))
    in_place = name.endswith("_") and not plain
    if torch.float32 not in found:
        return None if in_place else torch.float32
    if in_place:
        return args[0].dtype if args and isinstance(args[0], Tensor) else None
    return low if function in LOWERED else torch.float32


def _cast(x: Tensor, low: torch.dtype, to: torch.dtype) -> Tensor:
    return x.to(to) if x.dtype in (low, torch.float32) else x
