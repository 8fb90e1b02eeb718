"""memtrain's own values in an optimizer's checkpoint.

`torch.distributed.checkpoint` (`get_optimizer_state_dict`) saves the states of parameters and the
options of groups, and drops other keys. Therefore tensors are states of a parameter, and other
values are a tuple in an option of each group, which is saved whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.environment import is_called_from

KEY = "memtrain"
"""The option of a group, a tuple of names and plain values."""
CORRECTION = "weight_correction"
"""The state of a split weight."""
_MARK = (
    b"memtrain compressed these states: load memtrain.optim.portable_state_dict(optimizer) "
    b"into a plain optimizer. Steps: "
)


def numbered(
    groups: Sequence[dict[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[int, Tensor, dict[str, Any]]]:
    """Yield number, parameter and saved group for each parameter with states in a checkpoint."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        for number, param in zip(saved["params"], group["params"], strict=False):
            if number in state_dict["state"]:
                yield number, param, saved


def saved(state_dict: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with these names and plain values in the option `KEY` of its groups.

    Example:
        >>> saved({"param_groups": [{"lr": 0.1}]}, {"weights": {"steps": 3}})["param_groups"]
        [{'lr': 0.1, 'memtrain': (('weights', {'steps': 3}),)}]
    """
    whole = tuple({**found(state_dict), **values}.items())
    groups = [{**group, KEY: whole} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def found(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names and values that `saved` has added to a checkpoint."""
    options = (group.get(KEY) for group in state_dict["param_groups"])
    return dict(next(filter(None, options), ()))


def without(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of a plain optimizer: without corrections, the option empty."""
    states = {
        number: {name: value for name, value in values.items() if name != CORRECTION}
        if isinstance(values, Mapping)
        else values  # of no parameter
        for number, values in state_dict["state"].items()
        if not isinstance(values, Mapping) or set(values) != {CORRECTION}
    }
    groups = [
        {name: () if name == KEY else value for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}


def marked(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that torch's optimizers refuse to load, with the remedy in the error.

    The first count of steps becomes bytes: torch converts a count that is not a tensor by `float`,
    and the error shows the bytes. torch.distributed.checkpoint, whose flattened form allows no
    bytes, gets the tensor. SGD and Lion have no count, and refuse at the step.
    """
    if is_called_from("torch.distributed.checkpoint"):
        return state_dict
    for number, state in state_dict["state"].items():
        step = state.get("step")
        if type(step) is not Tensor or step.dim() or step.is_meta:
            continue
        if any(isinstance(value, dict) for value in state.values()):
            whole = {**state, "step": _MARK + str(step.item()).encode()}
            return {**state_dict, "state": {**state_dict["state"], number: whole}}
    return state_dict


def unmarked(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the count of steps that `marked` replaced."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    states = dict(state_dict["state"])
    # torch.distributed.checkpoint loads bytes under the number's text, beside the old count.
    for text in [n for n in states if isinstance(n, str) and n.isdigit() and int(n) in states]:
        states[int(text)] = {**states[int(text)], **states.pop(text)}
    found = {
        number: {
            **state,
            "step": torch.tensor(float(state["step"].removeprefix(_MARK)), dtype=dtype),
        }
        for number, state in states.items()
        if isinstance(state, dict) and isinstance(state.get("step"), bytes)
    }
    return {**state_dict, "state": {**states, **found}}
