"""Gradients of released weights, made a few rows at a time where nothing else adds to them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from memtrain.kernels.step.row_pieces import Make, stand_in
from memtrain.optim.wrappers.wrapper import WeakRef

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
_autograd: Any = torch._C


class _Deferred(NamedTuple):
    """A gradient that a use of a weight has not made."""

    backward: int
    """The number of autograd's graph task."""
    stand_in: Tensor
    """Zeros that the use returned in its place."""
    make: Make
    stream: Any
    """Of CUDA: that of what `make` reads; None elsewhere."""


class RowGradients:
    """Lets the backward of a weight's one use leave the weight's gradient to be made in pieces.

    The use's autograd function asks `defer`, and returns the zeros that it gets, which take no
    memory. Where autograd has added up what all uses of the weight returned, a hook before it
    accumulates sees whether that is these zeros themselves: then they were alone, the weight is
    stepped from pieces, and nothing is accumulated. Otherwise (a tied weight, a use that is no such
    function) the whole gradient is made and added, and goes on as any other. So what else uses a
    weight need not be known.

    Zeros would be wrong where a user reads gradients: of a backward that is asked for some tensors
    (`torch.autograd.grad`, `inputs=`), with a graph of its own (`create_graph=True`), or where the
    weight has hooks or a gradient already. There `defer` gives None, and where it knows that zeros
    would not be alone.

    Args:
        release: The `ReleaseGradients` that steps; it is not kept alive.
    """

    def __init__(self, release: WeakRef[Any]) -> None:
        self._release = release
        self.probe = torch.zeros(0, requires_grad=True)
        """An input of each use: in a backward that is asked for some tensors it is none of them."""
        self._nodes: dict[Tensor, tuple[Any, Any]] = {}  # which accumulate; handles of their hooks
        self._uses: Counter[Tensor] = Counter()  # in forwards since the last gradient or step
        self._deferred: dict[Tensor, list[_Deferred]] = {}

    def takes(self, weight: Tensor) -> bool:
        """Whether a weight's gradient may be made in pieces."""
        release = self._release()
        return release is not None and release.rows_at_once(weight) > 0

    def used(self, weight: Tensor) -> None:
        """Tell of a use in a forward, by a function that will ask `defer`."""
        self._uses[weight] += 1
        node: Any = get_gradient_edge(weight).node
        known, handle = self._nodes.get(weight, (None, None))
        if node is not known:  # a weight that was given another dtype has another
            if handle is not None:
                handle.remove()
            arrived = partial(_arrived, WeakRef(self), WeakRef(weight))
            self._nodes[weight] = node, node.register_prehook(arrived)

    def defer(self, weight: Tensor, make: Make) -> Tensor | None:
        """Zeros to return in a backward in the place of a gradient; None: make it, and return that.

        Args:
            weight: As `used` was told.
            make: Makes rows of the gradient; it is dropped when the backward ends.
        """
        release = self._release()
        if self._uses[weight] != 1 or weight not in self._nodes or not self.takes(weight):
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or release is None:
            return None
        if not weight.requires_grad or weight.grad is not None:
            return None
        if weight._backward_hooks or release.is_watched(weight):
            return None
        if not _autograd._will_engine_execute_node(get_gradient_edge(self.probe).node):
            return None
        backward = _autograd._current_graph_task_id()
        deferred = _Deferred(backward, stand_in(weight), make, _stream(weight))
        self._deferred.setdefault(weight, []).append(deferred)
        _engine.queue_callback(partial(self._take, weight, backward))
        return deferred.stand_in

    def _take(self, weight: Tensor, backward: int) -> list[_Deferred]:
        """Those that were deferred in a backward, and are so no more."""
        own = self._deferred.pop(weight, [])
        if left := [one for one in own if one.backward != backward]:
            self._deferred[weight] = left
        return [one for one in own if one.backward == backward]

    @torch.no_grad()
    def arrived(self, weight: Tensor, grad: Tensor | None) -> tuple[Tensor | None] | None:
        """A backward has added up a weight's gradient: step it, or give what to accumulate."""
        found = self._take(weight, _autograd._current_graph_task_id())
        self._uses[weight] = 0
        release = self._release()
        if not found or not weight.requires_grad or release is None:
            return None
        alone = len(found) == 1 and grad is found[0].stand_in
        for one in found:
            with _after(one.stream, _stream(weight)):
                if alone:
                    release.on_rows(weight, one.make)
                    return (None,)
                whole = one.make(0, len(weight))
                grad = whole if grad is None else grad + whole
        return (grad,)

    def forget(self) -> None:
        """A step is over."""
        self._uses.clear()
        self._deferred.clear()

    def detach(self) -> None:
        """Take the hooks off."""
        for _, handle in self._nodes.values():
            handle.remove()
        self._nodes.clear()


def _stream(x: Tensor) -> Any:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


@contextmanager
def _after(other: Any, own: Any) -> Iterator[None]:
    """Read, inside the block, what another stream has made, and may free after the block."""
    if other != own:
        own.wait_stream(other)
    yield
    if other != own:
        other.wait_stream(own)


def _arrived(
    rows: WeakRef[RowGradients], weight: WeakRef[Tensor], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None] | None:
    """Tell who steps that a weight's gradient is complete: a hook on the node that accumulates."""
    owner, param = rows(), weight()
    return None if owner is None or param is None else owner.arrived(param, grads[0])
