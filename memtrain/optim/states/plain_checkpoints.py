"""Checkpoints whose states are plain tensors, and what torch's `load_state_dict` changes."""

from collections.abc import Sequence
from numbers import Number
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.compressors import state_parts
from memtrain.optim.states.checkpoint_options import numbered
from memtrain.optim.states.layout import is_packed
from memtrain.optim.states.optimizer_hooks import innermost
from memtrain.optim.states.shards import local


def refuse_subclasses(values: dict[str, Any]) -> None:
    """Raise `ValueError` for a quantized tensor of another library, such as torchao's."""
    for name, value in values.items():
        if hasattr(local(value), "dequantize") and type(local(value)) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"state {name!r} is a {type(local(value)).__name__} of another library; allowed: "
                "plain tensors, such as its dequantize(torch.float32)"
            )


def refuse_payloads(optimizer: Optimizer) -> Any:
    """Make a plain optimizer refuse checkpoints with compressed states; return the hook's handle.

    Wrappers around the optimizer run the hook too.
    """
    return optimizer.register_load_state_dict_pre_hook(_check_plain)


def _check_plain(optimizer: Any, loaded: dict[str, Any]) -> None:
    optimizer, known = innermost(optimizer), state_parts()
    for number, param, _ in numbered(optimizer.param_groups, loaded):
        values = loaded["state"][number]
        refuse_subclasses(values)
        for name, value in values.items():
            if is_packed(value, known):
                raise ValueError(
                    f"state {name!r} of a parameter of shape {tuple(param.shape)} holds the "
                    f"payload {sorted(value)}, but the states of this {type(optimizer).__name__} "
                    "are plain: load it under the config that saved it; "
                    "memtrain.optim.portable_state_dict then gives one for any"
                )


def check_options(options: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise `ValueError` for an option whose default is of another kind."""
    for name, default in defaults.items():
        value = options[name]
        if _kind(default) and _kind(value) != _kind(default):
            raise ValueError(
                f"{name}={value!r} in a checkpoint; allowed: {_kind(default)}, such as {default!r}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, Number | Tensor):
        return "a number"
    many = isinstance(value, Sequence) and not isinstance(value, str)
    return f"{len(value)} numbers" if many else ""


def share_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the groups' dicts after `load_state_dict`, which replaces them, with its values.

    LR schedulers reference the dicts. Options that the checkpoint lacks have their defaults.
    """
    options = getattr(optimizer, "new_options", ())
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        lacking = {
            name: optimizer.defaults[name] for name in old.keys() & optimizer.defaults.keys()
        }
        kept = {name: old[name] for name in options if name in old}
        old.clear()
        old.update({**lacking, **new, **kept})
    optimizer.param_groups = groups


def restore_dtypes(optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    """Restore the states' dtypes after `load_state_dict`, which casts them to the parameter's."""
    for number, param, _ in numbered(optimizer.param_groups, loaded):
        states = optimizer.state[param]
        for name, value in loaded["state"][number].items():
            if isinstance(value, Tensor) and isinstance(known := states.get(name), Tensor):
                states[name] = value.detach().to(known.device, copy=True)
