"""Values cached per parameter, for as long as the parameter lives."""

import weakref
from collections.abc import Iterable
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


class Numbers(PerParameter[int]):
    """The number of each parameter in all groups, found again when a parameter is new."""

    def of(self, param: Tensor, params: Iterable[Tensor]) -> int:
        """Return a parameter's number.

        Args:
            param: One of `params`.
            params: Of all groups, in order.
        """
        found = self.get(param)
        if found is not None:
            return found
        for number, each in enumerate(params):
            self[each] = number
        return self[param]
