"""memtrain's own values in an optimizer's checkpoint.

`torch.distributed.checkpoint` (`get_optimizer_state_dict`) saves the states of parameters and the
options of groups, and drops other keys. Therefore tensors are states of a parameter, and other
values are a tuple in an option of each group, which is saved whole.
"""

from collections.abc import Mapping
from typing import Any

OWN = "memtrain"
"""The option of a group, a tuple of names and plain values."""
CORRECTION = "weight_correction"
"""The state of a split weight."""


def saved(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with more in the option `OWN` of its groups.

    Args:
        state_dict: Of an optimizer; it is not changed.
        own: Name -> plain value.

    Example:
        >>> saved({"param_groups": [{"lr": 0.1}]}, {"weights": {"steps": 3}})["param_groups"]
        [{'lr': 0.1, 'memtrain': (('weights', {'steps': 3}),)}]
    """
    whole = tuple({**found(state_dict), **own}.items())
    groups = [{**group, OWN: whole} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def found(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names and values that `saved` has added to a checkpoint."""
    given = (group.get(OWN) for group in state_dict["param_groups"])
    return dict(next(filter(None, given), ()))


def without(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint of a plain optimizer: without corrections, the option empty.

    Example:
        >>> without({"state": {0: {"weight_correction": 1}}, "param_groups": [{"memtrain": (1,)}]})
        {'state': {}, 'param_groups': [{'memtrain': ()}]}
    """
    states = {
        number: {name: value for name, value in values.items() if name != CORRECTION}
        for number, values in state_dict["state"].items()
        if set(values) != {CORRECTION}
    }
    groups = [
        {name: () if name == OWN else value for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}
