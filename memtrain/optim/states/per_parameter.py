"""Values cached per parameter, for as long as the parameter lives."""

import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class PerParameter(Generic[T]):
    """A dict from parameters to values that keeps no parameter alive.

    A dict with parameters as keys would keep parameters that the groups no longer have. Keys are
    ids, which is also faster: a tensor's hash is a Python function. Copies and pickles are empty,
    because their parameters are other ones.

    Example:
        >>> known, weight = PerParameter[int](), Tensor()
        >>> known[weight] = 1
        >>> known.get(weight), known.get(Tensor())
        (1, None)
        >>> del weight
        >>> len(known)
        0
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[T, weakref.ref[Tensor]]] = {}

    def get(self, param: Tensor) -> T | None:
        """Return the value of a parameter, or None."""
        found = self._known.get(id(param))
        return None if found is None else found[0]

    def __getitem__(self, param: Tensor) -> T:
        return self._known[id(param)][0]

    def __setitem__(self, param: Tensor, value: T) -> None:
        key, own = id(param), weakref.ref(self)

        def forget(_: weakref.ref[Tensor]) -> None:  # before another tensor can have this identity
            if (known := own()) is not None:
                known._known.pop(key, None)

        self._known[key] = value, weakref.ref(param, forget)

    def __len__(self) -> int:
        return len(self._known)

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}


class Positions(PerParameter[tuple[int, int, int]]):
    """Where each parameter is in an optimizer's groups, found again when a parameter is new.

    Example:
        >>> weight, bias = Tensor(), Tensor()
        >>> groups = [{"params": [weight]}, {"params": [bias]}]
        >>> Positions().number(bias, groups), Positions().group(bias, groups) is groups[1]
        (1, True)
    """

    def number(self, param: Tensor, groups: Sequence[dict[str, Any]]) -> int:
        """Return a parameter's number among those of all groups."""
        found = self.get(param)
        return self._find(param, groups)[0] if found is None else found[0]

    def group(self, param: Tensor, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the group that has a parameter now."""
        found = self.get(param)
        if found is not None:
            _, g, k = found
            if g < len(groups) and k < len(own := groups[g]["params"]) and own[k] is param:
                return groups[g]
        return groups[self._find(param, groups)[1]]

    def _find(self, param: Tensor, groups: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
        number = 0
        for g, group in enumerate(groups):
            for k, each in enumerate(group["params"]):
                self[each] = number, g, k
                number += 1
        return self[param]


def positions_of(optimizer: Any) -> Positions:
    """Return the positions of an optimizer's parameters, cached with it."""
    known = vars(optimizer)
    if "_positions" not in known:
        known["_positions"] = Positions()
    return known["_positions"]
