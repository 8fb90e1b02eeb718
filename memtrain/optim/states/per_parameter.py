"""Numbers and groups of an optimizer's parameters, cached by identity."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor


def number_of(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> int:
    """Return a parameter's number among those of all groups.

    Example:
        >>> weight, bias = Tensor(), Tensor()
        >>> optimizer, groups = lambda: None, [{"params": [weight]}, {"params": [bias]}]
        >>> number_of(optimizer, bias, groups), group_of(optimizer, bias, groups) is groups[1]
        (1, True)
    """
    return _position(optimizer, param, groups)[1]


def group_of(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the group that contains a parameter now."""
    _, _, g, k = _position(optimizer, param, groups)
    if g < len(groups) and k < len(params := groups[g]["params"]) and params[k] is param:
        return groups[g]
    optimizer._positions.clear()
    return groups[_position(optimizer, param, groups)[2]]


def stands_for(param: Any) -> Tensor:
    """Return the parameter that a user has, in whose place a leaf is stepped."""
    return getattr(param, "_stands_for", param)


def _position(optimizer: Any, param: Tensor, groups: Sequence[dict[str, Any]]) -> Any:
    """Return a weak reference to a parameter, its number, its group and its index there."""
    known, param = vars(optimizer).setdefault("_positions", {}), stands_for(param)
    found = known.get(id(param))
    if found is None or found[0]() is not param:  # another tensor had this id
        each = ((p, g, k) for g, group in enumerate(groups) for k, p in enumerate(group["params"]))
        known.clear()
        for n, (p, g, k) in enumerate(each):
            known[id(stands_for(p))] = ref(stands_for(p)), n, g, k
        found = known[id(param)]
    return found
