"""Bytes that convolutions and LSTMs hold on the CPU while they run: oneDNN's copies and layouts.

oneDNN's kernels for feature maps read and write blocks of channels (`nChw8c` with AVX2, `nChw16c`
with AVX-512). So torch's contiguous maps are copied into blocks, the result is made in blocks, and
then copied again. Channels-last maps are read and written where they lie. torch's own convolutions
(`Slow2d` and its kin) unfold their input into columns.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.activations.trace.rnn_workspace import GATES, row_nbytes

_ONEDNN = ("Mkldnn", "MkldnnTranspose", "???")  # the enumeration lacks the transposed one
_MOST_DEPTHWISE = 3  # of kernels whose gradient is computed from maps in blocks
_MOST_PADDING = 3  # of the kernels of blocks; beyond it a matrix product serves
_UNFOLD_ALL = ("Slow2d", "Slow3d")
_UNFOLD_ONE = ("SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d")


def convolution(  # noqa: PLR0913 (torch's own)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    y: Tensor,
) -> int:
    """Bytes that `aten.convolution` holds on the CPU besides its result.

    Args:
        x: As torch's.
        weight: As torch's.
        bias: As torch's.
        stride: As torch's.
        padding: As torch's.
        dilation: As torch's.
        transposed: As torch's.
        output_padding: As torch's.
        groups: As torch's.
        y: The result.

    Returns:
        Bytes: of maps in blocks and a blocked weight; of channels-last maps two copies of the
        weight; of columns.

    Example:
        >>> x, w = torch.empty(2, 32, 8, 8), torch.empty(64, 32, 3, 3)
        >>> y = torch.empty(2, 64, 8, 8)
        >>> convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, y=y) >= y.nbytes
        True
    """
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    backend = _backend(x, weight, bias, geometry)
    copied = _made_contiguous(x, x, weight)
    if backend not in _ONEDNN:
        return copied + _columns(backend, x, weight, stride, y, transposed=transposed)
    if _channels_last(x, weight):
        return _turned(x) + _turned(weight) + weight.nbytes
    if groups == 1 and max(padding) > _MOST_PADDING:
        return copied + y.nbytes
    inside = copied + _blocked_weight(weight) + _blocked(x, groups)
    inside += _blocked(y, groups) - y.nbytes
    # The result in blocks is copied to torch's order; a transposed one once more, into place.
    return max(inside, copied + (2 * y.nbytes if transposed else _blocked_or_plain(y, groups)))


def convolution_backward(  # noqa: PLR0913 (torch's own)
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> int:
    """Bytes that `aten.convolution_backward` holds on the CPU besides its results.

    Args:
        dy: The result's gradient.
        x: As torch's.
        weight: As torch's.
        bias_sizes: As torch's.
        stride: As torch's.
        padding: As torch's.
        dilation: As torch's.
        transposed: As torch's.
        output_padding: As torch's.
        groups: As torch's.
        mask: Which of the gradients of input, weight and bias are wanted.

    Returns:
        Bytes: the larger of what the input's gradient takes and what the weight's takes, which is
        made when the first is there.

    Example:
        >>> x, w = torch.empty(2, 32, 8, 8), torch.empty(64, 32, 3, 3)
        >>> dy, rest = torch.empty(2, 64, 8, 8), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        >>> convolution_backward(dy, x, w, None, *rest, [True, True, False]) == x.nbytes + dy.nbytes
        True
    """
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    copied = _made_contiguous(x, x, weight) + _made_contiguous(dy, x, weight)
    backend = _backend(x, weight, None, geometry)
    if backend not in _ONEDNN:
        held = _columns(backend, x, weight, stride, dy, transposed=transposed, mask=mask)
        if mask[2]:  # a sum, before the weight's gradient is there
            held = max(held, _widened(dy) - mask[1] * weight.nbytes)
        return copied + held
    if _channels_last(x, weight):
        wide = mask[1] and _is_alone(x, groups) and max(weight.shape[2:]) > _MOST_DEPTHWISE
        columns = weight.nbytes * (256 if _lanes() == 16 else 64) if wide else 0
        turned = sum(map(_turned, (x, dy, weight)))
        return columns + turned + (2 if mask[1] else 1) * weight.nbytes
    of_input = of_weight = 0
    if mask[0]:
        grouped = groups > 1
        blocked = _blocked(x, groups)
        of_input = _blocked(dy, groups) + _blocked_weight(weight) + max(0, blocked - x.nbytes)
        # Strides over all channels: made channels last, copied so, then copied to torch's order.
        strided = max(stride) > 1 and not grouped and not transposed
        if strided:
            of_input = max(dy.nbytes + weight.nbytes, 2 * x.nbytes)
        of_input = max(of_input, _blocked_or_plain(x, groups))
        if groups == 1 and max(dilation) > 1:
            of_input = max(x.nbytes, _unfolded(x, weight, dy))
    if mask[1]:
        of_weight = _read_for_weight(x, dy, weight, groups, dilation)
        if not mask[0]:
            return copied + of_weight
        of_input -= weight.nbytes  # which is among the results, and not yet there
    return copied + max(of_input, of_weight)


def lstm(x: Tensor, weight: Tensor, recurrent: Tensor) -> int:
    """Bytes that one layer of oneDNN's LSTM holds besides its results and its workspace.

    Args:
        x: [time, batch, features].
        weight: [4 * hidden, features].
        recurrent: [4 * hidden, hidden].

    Returns:
        Bytes: the gates of all steps, and the weights in the kernel's layout.

    Example:
        >>> lstm(torch.empty(4, 4, 16), torch.empty(64, 16), torch.empty(64, 16)) > 4 * 4 * 64 * 4
        True
    """
    steps, batch, _ = x.shape
    gates = steps * batch * row_nbytes(GATES * recurrent.shape[1], x.element_size())
    return gates + weight.nbytes + recurrent.nbytes


def lstm_backward(x: Tensor, weight: Tensor, recurrent: Tensor, dy: Tensor | None) -> int:
    """Bytes that the backward of one layer of oneDNN's LSTM holds besides its results.

    Args:
        x: [time, batch, features].
        weight: [4 * hidden, features].
        recurrent: [4 * hidden, hidden].
        dy: The gradient of the layer's output.

    Returns:
        Bytes, at most: as in the forward, the gradients of the weights in the kernel's layout, and
        a copy of a gradient that is not contiguous. Small layers hold up to an eighth less.

    Example:
        >>> sizes = torch.empty(4, 4, 16), torch.empty(64, 16), torch.empty(64, 16)
        >>> lstm_backward(*sizes, None) - lstm(*sizes)
        8192
    """
    copied = 0 if dy is None or dy.is_contiguous() else dy.nbytes
    return lstm(x, weight, recurrent) + weight.nbytes + recurrent.nbytes + copied


def _backend(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> str:
    """Name of the implementation that torch chooses."""
    choose: Any = torch._C._select_conv_backend  # pyright: ignore[reportAttributeAccessIssue]
    return choose(x, weight, bias, *geometry).name


def _lanes() -> int:
    """Channels of a block."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _in_blocks(channels: int, groups: int) -> bool:
    """Whether kernels of blocks serve: many channels together, each alone, or blocks of them."""
    lanes = _lanes()
    if groups == 1:
        return channels >= lanes or channels > 3
    return channels == groups or channels // groups % lanes == 0


def _blocked(maps: Tensor, groups: int) -> int:
    """Bytes of a copy in blocks; 0 where the kernel reads torch's order."""
    channels = maps.shape[1]
    if not _in_blocks(channels, groups):
        return 0
    lanes = _lanes()
    return maps.nbytes // max(channels, 1) * (-(-channels // lanes) * lanes)


def _blocked_or_plain(maps: Tensor, groups: int) -> int:
    return _blocked(maps, groups) or maps.nbytes


def _blocked_weight(weight: Tensor) -> int:
    lanes, (a, b) = _lanes(), weight.shape[:2]
    filled = -(-a // lanes) * lanes * (-(-b // lanes) * lanes if b > 3 else b)
    return weight.nbytes // max(a * b, 1) * filled


def _read_for_weight(
    x: Tensor, dy: Tensor, weight: Tensor, groups: int, dilation: Sequence[int]
) -> int:
    """Bytes of what the weight's gradient is computed from: maps in blocks, or a matrix product.

    The product is that of columns of one sample, group and depth, and sums into copies of the
    gradient. It serves large and dilated kernels, and channels that fill no blocks.
    """
    blocks, wide = _blocked(x, groups) + _blocked(dy, groups), _lanes() == 16
    if max(dilation) > 1 or max(weight.shape[2:]) > (14 if wide else 13):
        return _unfolded(x, weight, dy) + 4 * weight.nbytes
    if _is_alone(x, groups):
        if max(weight.shape[2:]) <= _MOST_DEPTHWISE:
            return blocks
        return _unfolded(x, weight, dy) + 4 * weight.nbytes
    filled = all(channels % _lanes() == 0 for channels in (x.shape[1], dy.shape[1]))
    deep = x.dim() == 5 and weight.shape[2:].numel() > 1
    if (deep and not (filled and wide)) or (groups > 1 and not _in_blocks(x.shape[1], groups)):
        return _unfolded(x, weight, dy) + 4 * weight.nbytes
    return blocks


def _is_alone(x: Tensor, groups: int) -> bool:
    """Whether each channel is a group: a depthwise convolution."""
    return groups > 1 and groups == x.shape[1]


def _unfolded(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """Bytes of the columns of one sample, group and depth."""
    places = y.shape[3:] if y.dim() == 5 else y.shape[2:]
    return weight.shape[1:].numel() * places.numel() * x.element_size()


def _channels_last(x: Tensor, weight: Tensor) -> bool:
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.dim() in (4, 5) and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=form) for t in (x, weight)
    )


def _turned(x: Tensor) -> int:
    """Bytes of a copy of maps that do not lie channels last."""
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return 0 if x.is_contiguous(memory_format=form) else x.nbytes


def _made_contiguous(maps: Tensor, x: Tensor, weight: Tensor) -> int:
    """Bytes of a copy in torch's order of maps that are in neither of the two orders."""
    return 0 if maps.is_contiguous() or _channels_last(x, weight) else maps.nbytes


def _widened(x: Tensor) -> int:
    """Bytes of a float32 copy of 16-bit floats; 0 of others, which need none."""
    return 2 * x.nbytes if x.dtype in (torch.float16, torch.bfloat16) else 0


def _columns(
    backend: str,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    y: Tensor,
    *,
    transposed: bool,
    mask: Sequence[bool] | None = None,
) -> int:
    """Bytes of the columns of torch's own convolutions: of all samples, or of one at a time."""
    if backend not in _UNFOLD_ALL + _UNFOLD_ONE or not x.numel():
        return 0
    kernel = weight.shape[2:].numel()
    of = weight.shape[1]  # of a group: one is worked on after another
    one = of * kernel * math.prod((x if transposed else y).shape[2:]) * x.element_size()
    if backend == "SlowTranspose2d" and mask is None:
        return one * len(x) + (_widened(x) and 2 * one)  # the product of a sample's in float32
    if backend in _UNFOLD_ONE:
        return one
    unfolded = kernel > 1 or max(stride) > 1
    if mask is None or mask[1]:
        if unfolded or not mask or not mask[0]:
            return one * len(x) if unfolded else 0
        every = one * len(x) if backend == "Slow3d" else one
        return max(0, every - weight.nbytes)  # the weight's gradient is not there yet
    return one
