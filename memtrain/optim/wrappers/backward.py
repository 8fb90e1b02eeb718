"""Hooks on gradients of a backward, one thread at a time, and the detection of its end."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from memtrain.optim.wrappers.wrapper import WeakRef

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
_F = TypeVar("_F", bound=Callable[..., Any])


def one_at_a_time(method: _F) -> _F:
    """Make a method wait for the object's other decorated methods in other threads.

    Gradients come in several threads: autograd has one for each device.

    Args:
        method: Of an object with a `_lock`, an `RLock`.
    """

    @wraps(method)
    def inner(self: Any, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return inner  # pyright: ignore[reportReturnType]


class Backward:
    """Detects the end of the backward in which gradients arrive, and whether it broke off.

    Example:
        >>> backward, weight = Backward(), torch.ones(1, requires_grad=True)
        >>> def arrived(weight):
        ...     assert not backward.entered(lambda: print("ended"))
        >>> handle = weight.register_post_accumulate_grad_hook(arrived)
        >>> (2 * weight).backward()
        ended
        >>> backward.broke_off
        False
    """

    def __init__(self) -> None:
        self._end: weakref.ref[_End] | None = None
        self._broke_off = False

    def entered(self, at_end: Callable[[], None]) -> bool:
        """Record that a gradient arrives in the current thread.

        Args:
            at_end: Called once when this backward ends, with the caller's streams current. It is
                not called where the backward raises, nor outside of a backward.

        Returns:
            Whether this is a backward after one that broke off.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        end = None if self._end is None else self._end()
        if end is None or end.task != task:
            self._broke_off = self.broke_off
            end = _End(self, task, at_end)
            self._end = weakref.ref(end)
            _engine.queue_callback(end)
        return self._broke_off

    def ended(self, task: int) -> None:
        """Record that the backward of this graph task has ended."""
        end = None if self._end is None else self._end()
        if end is not None and end.task == task:
            self._end = None

    @property
    def broke_off(self) -> bool:
        """Whether a backward that brought gradients raised before its end, since `forget`."""
        return self._broke_off or (self._end is not None and self._end() is None)

    def refused(self) -> None:
        """Record a refused backward as ended: its error says what to do."""
        self._end = None

    def forget(self) -> None:
        """Start a new step with the next backward."""
        self._end, self._broke_off = None, False


class _End:
    """Called by autograd when a backward ends; freed without a call where that raises."""

    def __init__(self, backward: Backward, task: int, at_end: Callable[[], None]) -> None:
        self.task, self._backward, self._at_end = task, backward, at_end

    def __call__(self) -> None:
        self._backward.ended(self.task)
        self._at_end()


def call_on_gradient(release: WeakRef[Any], param: Tensor) -> None:
    """Notify the optimizer that a gradient is complete: a hook on each parameter."""
    optimizer = release()
    if optimizer is not None:
        optimizer.on_gradient(param)


def released_by(param: Tensor) -> WeakRef[Any]:
    """Return a weak reference to the optimizer that updates a parameter in the backward, or empty.

    The parameter's own hook has the reference: a copy of a model with its optimizer finds the
    copied optimizer, and a copy of the model alone finds none.
    """
    hooks: Any = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        if isinstance(hook, partial) and hook.func is call_on_gradient:
            return hook.args[0]
    return WeakRef()


def hook_gradients(optimizer: Any, params: Iterable[Tensor], handles: dict[Tensor, Any]) -> None:
    """Hook the trained parameters without a handle; hooks do not keep the optimizer alive."""
    hook = partial(call_on_gradient, WeakRef(optimizer))
    for param in params:
        if param.requires_grad and param not in handles:
            handles[param] = param.register_post_accumulate_grad_hook(hook)
