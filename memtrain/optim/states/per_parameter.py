"""Values cached per parameter, for as long as the parameter lives."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


def positions_of(optimizer: Any) -> Any:
    """Return a cache of the optimizer: parameter -> its number, its group and its index there."""
    known = vars(optimizer)
    if "_positions" not in known:
        known["_positions"] = WeakIdKeyDictionary()
    return known["_positions"]


def number_of(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> int:
    """Return a parameter's number among those of all groups.

    Example:
        >>> weight, bias = Tensor(), Tensor()
        >>> optimizer, groups = lambda: None, [{"params": [weight]}, {"params": [bias]}]
        >>> number_of(optimizer, bias, groups), group_of(optimizer, bias, groups) is groups[1]
        (1, True)
        >>> del weight, groups[0]
        >>> len(positions_of(optimizer))
        1
    """
    found = positions_of(optimizer).get(param)
    return _find(optimizer, param, groups)[0] if found is None else found[0]


def group_of(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the group that contains a parameter now."""
    found = positions_of(optimizer).get(param)
    if found is not None:
        _, g, k = found
        if g < len(groups) and k < len(own := groups[g]["params"]) and own[k] is param:
            return groups[g]
    return groups[_find(optimizer, param, groups)[1]]


def _find(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    positions, number = positions_of(optimizer), 0
    for g, group in enumerate(groups):
        for k, each in enumerate(group["params"]):
            positions[each] = number, g, k
            number += 1
    return positions[param]
