"""Hooks on gradients of a backward, one thread at a time, and the detection of its end."""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memtrain.optim.wrappers.wrapper import WeakRef

_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]


class Backward:
    """Detects the end of the backward in which gradients arrive, and whether it broke off."""

    def __init__(self) -> None:
        self._end: weakref.ref[Any] | None = None  # what autograd calls at the end
        self._task = -1
        self._broke_off = False

    def entered(self, at_end: Callable[[], None]) -> bool:
        """Record a gradient, and return whether this is a backward after one that broke off.

        `at_end` is called once when this backward ends, with the caller's streams current. It is
        not called if the backward raises, nor outside of a backward.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return False
        if self._task != task or self._end is None or self._end() is None:
            self._broke_off = self.broke_off

            def end() -> None:  # autograd frees it without a call if the backward raises
                if self._task == task:
                    self._end = None
                at_end()

            self._task, self._end = task, weakref.ref(end)
            _engine.queue_callback(end)
        return self._broke_off

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


@torch.no_grad()
def call_on_gradient(release: WeakRef[Any], param: Tensor) -> None:
    """Notify the optimizer that a gradient is complete: a hook on each parameter.

    Autograd has one thread for each device, and the optimizer's lock lets one in.
    """
    optimizer = release()
    if optimizer is not None:
        with optimizer.lock:
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
