"""Hooks of wrapped optimizers: each runs once, with the outermost optimizer's checkpoint."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
SAVE = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
LOAD = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def innermost(optimizer: Any) -> Any:
    """Return the optimizer with the states, inside the wrappers of `wrap`."""
    while hasattr(optimizer, "inner"):
        optimizer = optimizer.inner
    return optimizer


def chain(optimizer: Any) -> list[Any]:
    """Return an optimizer and those inside it, the original of a compressed one last."""
    found = []
    while optimizer is not None:
        found.append(optimizer)
        optimizer = getattr(optimizer, "inner", None) or getattr(optimizer, "original", None)
    return found


def find(optimizer: Any, *kinds: type) -> Any:
    """Return the first optimizer of these classes in `chain`, or None."""
    return next((one for one in chain(optimizer) if isinstance(one, kinds)), None)


def notify_schedulers(optimizer: Optimizer) -> None:
    """Mark the optimizers inside as stepped: otherwise LR schedulers made for them warn."""
    for inner in chain(optimizer)[1:]:
        inner._opt_called = True


def share(optimizer: Optimizer, inner: Optimizer) -> None:
    """Share the present and later hooks of `inner` with `optimizer`."""
    for name in (*STEP, *SAVE, *LOAD):
        setattr(optimizer, name, getattr(inner, name))


@contextmanager
def disabled(optimizer: Optimizer, names: tuple[str, str]) -> Iterator[None]:
    """Remove these hooks from an optimizer inside the block."""
    kept = {name: getattr(optimizer, name) for name in names}
    vars(optimizer).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def saved(outer: Optimizer, inner: Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `make`, which calls `inner.state_dict()`, with the hooks of `outer` only."""
    before, after = (getattr(outer, name).values() for name in SAVE)
    for hook in before:
        hook(outer)
    with disabled(inner, SAVE):
        state_dict = make()
    for hook in after:
        replaced = hook(outer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def loaded(
    outer: Optimizer,
    inner: Optimizer,
    state_dict: dict[str, Any],
    apply: Callable[[dict[str, Any]], None],
) -> None:
    """Call `apply`, which calls `inner.load_state_dict`, with the hooks of `outer` only."""
    before, after = (getattr(outer, name).values() for name in LOAD)
    state_dict = dict(state_dict)
    for hook in before:
        replaced = hook(outer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    with disabled(inner, LOAD):
        apply(state_dict)
    for hook in after:
        hook(outer)
