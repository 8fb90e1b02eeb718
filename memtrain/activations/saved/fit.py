"""The compressor that fits a save's dtype and op, where the rules have chosen one."""

from functools import partial

import torch
from torch import Tensor

from memtrain.activations.saved.cache import Copy, Save
from memtrain.activations.saved.site import Op
from memtrain.compressors import Compressor, Integers, Keep, Mask
from memtrain.compressors.log_group import of_logarithms
from memtrain.kernels.dispatch import is_for_cuda

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""They save a tensor for each step of a sequence that they read whole."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int16, torch.int32, torch.int64)
LOG_PROBABILITIES = ("cross_entropy", "log_softmax", "nll_loss")
"""They save these alone."""
ATTENTION = "scaled_dot_product_attention"
UNSCALED_ATTENTION = "dot_product_attention"
"""The same function with a scale of 1 or more, of which rules may think otherwise: it saturates."""
WIDE_ATTENTION = "wide_dot_product_attention"
"""That with heads of 256 or more: of queries and keys whose elements are about 1, the error of a
score grows with the root of their number, and here exceeds 0.2 with 8 bits: the exponent's."""
WIDE = 256
ATTENTIONS = (ATTENTION, UNSCALED_ATTENTION, WIDE_ATTENTION)
ATTENTION_MASK = "an attention mask: what it leaves out has a number that fits in no group"
LOGSUMEXP = "a statistic: attention's log-sum-exp, of which its backward takes exp()"
_MASK_PLACE = 3  # among the op's tensors
_HEAD_ALIGNMENT = 8  # of the heads that CUDA's kernels are given, in elements

RESERVE = "the library's own reserve, opaque bytes: activations.recompute of its module spares it"
"""Why a fused recurrent layer's workspace is kept (oneDNN's, cuDNN's)."""
FLAT_WEIGHTS = "the layer's weights, as cuDNN lays them out"
"""Why a recurrent layer's save of one dimension is kept: its activations have a batch too."""


def attention(scale: object, width: int) -> str:
    """The name in rules of fused attention.

    Args:
        scale: What it was given, or None.
        width: Elements of a head's query.

    Example:
        >>> attention(None, 512), attention(1.0, 64), attention(1.0, 512)[:4]
        ('scaled_dot_product_attention', 'dot_product_attention', 'wide')
    """
    if not isinstance(scale, int | float) or scale < 1:
        return ATTENTION
    return UNSCALED_ATTENTION if width < WIDE else WIDE_ATTENTION


def is_logsumexp(x: Tensor, query: Tensor) -> bool:
    """Whether what attention saves is its log-sum-exp, one number a query.

    CUDA's memory-efficient kernel pads the queries to a multiple of 32, with +inf.
    """
    return x.shape[:-1] == query.shape[:-2]


def needless(op: Op) -> bool:
    """Whether of a convolution's input and weight only one has a gradient, which needs the other.

    torch saves both, whichever that is. (A bias has one dimension, and its gradient needs neither.)
    """
    return sum(x.requires_grad for x in op.inputs if x.dim() > 1) == 1


def _attention_mask(
    save: Save, op: Op, chosen: Compressor, copy: Copy | None, *, requires_grad: bool
) -> tuple[Compressor | Keep, Copy | None]:
    """The compressor of an attention's save: a mask takes one bit, or is kept.

    Of a mask of bools attention makes a bias of 0 and a low number, and saves that: -inf, or for
    cuDNN -65504. For CUDA's memory-efficient kernel it pads its rows and expands it to all scores.
    """
    x, place = save.tensor, op.place(save.storage)
    if len(op.inputs) <= _MASK_PLACE or 0 <= place < _MASK_PLACE:
        return chosen, copy
    query, key, value, mask = op.inputs[: _MASK_PLACE + 1]
    if place < 0 and x.shape not in (mask.shape, (*query.shape[:-1], key.shape[-2])):
        return chosen, copy
    if requires_grad != mask.requires_grad:
        return chosen, copy
    if not is_for_cuda(x) and (op.dropout or mask.requires_grad):
        return chosen, copy  # the CPU writes it out, and saves no bias, but what dropout drew
    told = not mask.is_inference() and _is_told_apart(x, query, key, value)
    if mask.dtype != torch.bool or not told:
        return Keep(ATTENTION_MASK), copy
    numel = x.untyped_storage().nbytes() // x.itemsize
    low = _stored(x).amin()  # 0 where nothing is hidden
    return Mask(), Copy.of(mask, partial(_bias_of, low, x.shape, x.stride(), numel))


def _is_told_apart(x: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `x`, which has no gradient, can be nothing else of an attention than its bias.

    A query, key or value that has none is saved, too, with heads that are padded to a multiple of
    8; and where scores have none, so are their probabilities, if torch writes the function out.
    """
    return (query.requires_grad or key.requires_grad) and not any(
        x.shape[:-1] == other.shape[:-1] and 0 <= x.shape[-1] - other.shape[-1] < _HEAD_ALIGNMENT
        for other in (query, key, value)
        if not other.requires_grad
    )


def _stored(x: Tensor) -> Tensor:
    """The elements of `x` that memory holds: those of a stride of 0 once."""
    for dim, step in enumerate(x.stride()):
        if step == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _bias_of(
    low: Tensor, shape: torch.Size, stride: tuple[int, ...], numel: int, mask: Tensor
) -> Tensor:
    """The bias that attention made of a mask, in the memory order that its kernel was given."""
    bias = _stored(low.new_zeros(numel).as_strided(shape, stride))
    hidden = ~mask.expand(shape)[tuple(map(slice, bias.shape))]
    return bias.masked_fill_(hidden, low).expand(shape)


def fit(
    save: Save, op: Op, chosen: Compressor, copy: Copy | None, *, requires_grad: bool
) -> tuple[Compressor | Keep, Copy | None]:
    """The compressor for this dtype and op, and what the save is a copy of."""
    plain = save.tensor.dtype in FLOATS and not chosen.gives_derivative
    if plain and op.name in LOG_PROBABILITIES:
        return of_logarithms(chosen), copy
    if plain and op.name == "logsumexp" and _reduces_rows(save.tensor, op):
        return of_logarithms(chosen, row=save.tensor.shape[-1]), copy
    if chosen.is_identity or (plain and op.name not in ATTENTIONS):
        return chosen, copy
    if plain:
        return _attention_mask(save, op, chosen, copy, requires_grad=requires_grad)
    return _lossless(save.tensor, op), copy


def _reduces_rows(x: Tensor, op: Op) -> bool:
    """Whether logsumexp reduces the last dimension of a contiguous tensor, and no other."""
    args, kwargs = op.given
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    (dim,) = dim if isinstance(dim, tuple | list) and len(dim) == 1 else (dim,)
    return x.dim() > 0 and dim in (-1, x.dim() - 1) and x.is_contiguous()


def _lossless(x: Tensor, op: Op) -> Compressor | Keep:
    """The compressor for this dtype: masks and indices are packed without loss."""
    if x.dtype == torch.bool:
        return Mask()
    if x.dtype in INTEGERS:
        return Integers(limit=op.limit)
    if x.dtype not in FLOATS:
        return Keep(RESERVE if op.name in RECURRENT else f"dtype {x.dtype}")
    return Keep("derivative codes serve replaced nonlinearities only")
