"""Whether a forward is an interception's own: others may trace, transform, or hold hooks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from memtrain.activations.saved.origin import in_transform
from memtrain.activations.saved.site import IN_TRANSFORM, OTHER_HOOKS

_HOOKS: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
top_pair = _HOOKS._top_saved_tensors_default_hooks
"""Given True, returns the pair of saved-tensor hooks on top of autograd's stack, or None."""
_CALL = nn.Module._call_impl.__code__


_tracing: ContextVar[object | None] = ContextVar("tracing", default=None)
"""The interception that traces in this thread; others' forwards are compressed as ever."""


def suspended(interception: object) -> bool:
    """Return whether another interception traces a forward."""
    only = _tracing.get()
    return only is not None and only is not interception


@contextmanager
def suspend_others(interception: object) -> Iterator[None]:
    """Suspend every other interception inside the block."""
    token = _tracing.set(interception)
    try:
        yield
    finally:
        _tracing.reset(token)


def saves() -> bool:
    """Return whether the running code saves tensors for a later backward."""
    return torch.is_grad_enabled() and not torch.jit.is_tracing() and not _in_backward()


def is_free() -> bool:
    """Return whether only a later backward reads what is saved now."""
    return top_hooks() is None and not _in_backward()


def _in_backward() -> bool:
    """Where reentrant checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def why_inactive() -> str:
    """Return why memtrain may not pack saved tensors, or an empty string."""
    if top_hooks() is not None:
        return OTHER_HOOKS
    if in_transform():
        return IN_TRANSFORM
    return ""


def top_hooks() -> Any:
    """Return the pack function on top of autograd's saved-tensor hooks, or None."""
    top = top_pair(True)
    return None if top is None else top[0]


def calls_itself(module: nn.Module) -> bool:
    """Return whether two calls of the module run in this thread, the pre-hook's included."""
    frame, calls = sys._getframe(), 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1
