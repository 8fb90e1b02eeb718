"""Workspace that oneDNN's LSTM keeps for its backward, of which fake tensors know nothing."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
GATES = 4  # of an LSTM's cell
_PAGE, _LINE, _ALIAS = 4096, 64, 1024


class RnnWorkspaces(TorchDispatchMode):
    """Gives the fake result of `aten.mkldnn_rnn_layer` a workspace of its real size.

    torch runs each layer and direction of an `nn.LSTM` on the CPU by it, in float32; what other
    dtypes and other cells save are tensors of torch's own, of right sizes.

    Example:
        >>> from torch._subclasses import FakeTensorMode
        >>> with FakeTensorMode(), RnnWorkspaces():
        ...     lstm = torch.nn.LSTM(16, 16)
        ...     y, _ = lstm(torch.zeros(4, 4, 16))
        >>> sum(t.nbytes for t in y.grad_fn._raw_saved_workspace) if False else y.shape
        torch.Size([4, 4, 16])
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        return with_workspace(func, args, func(*args, **(kwargs or {})))


def with_workspace(func: Any, args: Any, result: Any) -> Any:
    """Give an op's fake result, where it is `aten.mkldnn_rnn_layer`'s, a workspace of its size.

    Args:
        func: The op, as a dispatch mode is given it.
        args: Its arguments.
        result: What it returned.
    """
    if func is not LAYER:
        return result
    output, hidden, cell, workspace = result
    return output, hidden, cell, workspace.new_empty(rnn_workspace_nbytes(args[0], args[2]))


def rnn_workspace_nbytes(x: Tensor, recurrent: Tensor) -> int:
    """Bytes of the workspace of one layer of an LSTM.

    oneDNN lays out: the gates and the hidden states of each step; the states of the input, of the
    layer and of their gradients at each step and one more, for the layer and what is below it; and
    so the cells' and their gradients. Rows are whole cache lines, with one more where they are
    whole KiB, and each part begins at a page.

    Args:
        x: [time, batch, features] (or [batch, time, features]), float32.
        recurrent: The recurrent weight, [4 * hidden, hidden].

    Returns:
        Bytes.

    Example:
        >>> rnn_workspace_nbytes(torch.empty(4, 4, 64), torch.empty(64, 16))
        53248

    Reference:
        oneDNN's `rnn_utils.cpp`.
    """
    steps, batch, features = x.shape
    size, hidden = x.element_size(), recurrent.shape[1]
    once, state = steps * batch, 2 * (steps + 1) * batch
    widest = row_nbytes(max(features, hidden), size)
    parts = [
        once * row_nbytes(GATES * hidden, size),
        once * row_nbytes(hidden, size),
        *[state * widest] * 3,
        *[state * hidden * size] * 2,
    ]
    return sum(-(-part // _PAGE) * _PAGE for part in parts)


def row_nbytes(elements: int, size: int) -> int:
    """Bytes from one row of a matrix to the next: whole cache lines, but no whole KiB.

    Args:
        elements: Of a row.
        size: Bytes of an element.

    Example:
        >>> row_nbytes(100, 4), row_nbytes(256, 4)
        (448, 1088)
    """
    nbytes = -(-elements * size // _LINE) * _LINE
    return nbytes + _LINE * (nbytes % _ALIAS == 0)
