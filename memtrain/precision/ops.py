"""What a torch function is to precision: a GEMM, a move of elements, a question about a tensor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

# Matrix products, by the torch function's name without underscores at either end. What a function
# of several GEMMs does inside (an LSTM, multi-head attention) is one operator.
_GEMMS = """
linear bilinear matmul rmatmul mm bmm mv dot addmm addmv addbmm baddbmm einsum tensordot
chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
convolution scaled_dot_product_attention multi_head_attention_forward
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""

# Their results hold elements of their first argument, so that a format is kept.
_MOVES = """
contiguous clone reshape flatten to float half bfloat16 type type_as cpu cuda getitem detach
index_select roll flip unfold repeat repeat_interleave tile
"""

# They read no element of a weight: it need not be rounded for them.
_QUESTIONS = """
size dim numel nelement ndimension stride element_size get_device data_ptr storage_offset
untyped_storage storage is_contiguous is_floating_point is_complex is_tensor is_set_to is_pinned
is_storage is_same_size is_inference requires_grad_ register_hook retain_grad has_names len repr
hash str format deepcopy detach_ result_type can_cast zeros_like ones_like empty_like full_like
rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
register_post_accumulate_grad_hook
"""

GEMMS, MOVES, QUESTIONS = (frozenset(names.split()) for names in (_GEMMS, _MOVES, _QUESTIONS))


def is_gemm(op: str) -> bool:
    """Whether an op, named as in sites, multiplies matrices.

    Example:
        >>> is_gemm("conv2d"), is_gemm("relu")
        (True, False)
    """
    return op in GEMMS


def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among a function's arguments, one level of lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument in place.

    Example:
        >>> writes("add_", {}), writes("__iadd__", {}), writes("__add__", {}), writes("add", {})
        (True, True, False, False)
    """
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")
