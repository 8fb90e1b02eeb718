"""The parameters and buffers of a model, found anew at each forward."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_not
from typing import TypeVar

from torch import Tensor, nn

_T = TypeVar("_T")


class OwnTensors:
    """A model's parameters and buffers, some perhaps twice.

    `model.parameters()` names each as it goes; here the modules are walked again only where they
    are others than before. The model itself is not kept alive.
    """

    def __init__(self) -> None:
        self._below: list[nn.Module] = []  # the model's modules but itself
        self._inside: list[nn.Module | None] = []  # submodules of them all

    def find(self, model: nn.Module) -> list[Tensor]:
        """Those that are there now."""
        modules, known = [model, *self._below], self._inside
        inside = _values([module._modules for module in modules])
        # Whether they are the same, not equal: what `==` means is theirs to say.
        if len(inside) != len(known) or any(map(is_not, inside, known)):
            modules = [*model.modules()]
            self._below = modules[1:]
            self._inside = _values([module._modules for module in modules])
        held = [module._parameters for module in modules]
        held += [module._buffers for module in modules if module._buffers]
        return [x for x in _values(held) if x is not None]


def _values(dicts: Sequence[Mapping[str, _T]]) -> list[_T]:
    return [*chain.from_iterable([each.values() for each in dicts])]
