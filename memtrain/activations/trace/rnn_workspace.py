"""Workspace that oneDNN's LSTM keeps for its backward, of which fake tensors know nothing."""

from torch import Tensor

GATES = 4  # of an LSTM's cell
_PAGE, _LINE, _ALIAS = 4096, 64, 256


def rnn_workspace_nbytes(x: Tensor, recurrent: Tensor) -> int:
    """Bytes of the workspace of one layer of an LSTM.

    oneDNN lays out: the gates and the hidden states of each step; the states of the input, of the
    layer and of their gradients at each step and one more, for the layer and what is below it; and
    so the cells' and their gradients. Gradients are float32. Rows are whole cache lines, with one
    more where they are a multiple of 256 elements, and each part begins at a page.

    `x` is [time, batch, features] or [batch, time, features], float32 or bfloat16; the recurrent
    weight is [4 * hidden, hidden].

    Example:
        >>> import torch
        >>> rnn_workspace_nbytes(torch.empty(4, 4, 64), torch.empty(64, 16))
        53248

    Reference:
        oneDNN's `rnn_utils.cpp`.
    """
    steps, batch, features = x.shape
    size, hidden = x.element_size(), recurrent.shape[1]
    once, state = steps * batch, 2 * (steps + 1) * batch
    widest = max(features, hidden)
    parts = [
        once * row_nbytes(GATES * hidden, size),
        once * row_nbytes(hidden, size),
        state * row_nbytes(widest, size),
        *[state * row_nbytes(widest, 4)] * 2,
        *(state * hidden * each for each in (size, 4)),
    ]
    return sum(-(-part // _PAGE) * _PAGE for part in parts)


def row_nbytes(elements: int, size: int) -> int:
    """Bytes from one row of a matrix to the next: whole cache lines, and no multiple of 256.

    Example:
        >>> row_nbytes(100, 4), row_nbytes(256, 4)
        (448, 1088)
    """
    line = _LINE // size
    elements = -(-elements // line) * line
    return size * (elements + line * (elements % _ALIAS == 0))
