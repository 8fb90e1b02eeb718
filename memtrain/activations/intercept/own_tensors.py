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
    are others than before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._inside: list[nn.Module | None] = []  # their submodules

    def find(self) -> list[Tensor]:
        """Those that are there now."""
        modules, known = self._modules, self._inside
        inside = _values([module._modules for module in modules])
        # Whether they are the same, not equal: what `==` means is theirs to say.
        if not modules or len(inside) != len(known) or any(map(is_not, inside, known)):
            modules = self._modules = [*self._model.modules()]
            self._inside = _values([module._modules for module in modules])
        held = [module._parameters for module in modules]
        held += [module._buffers for module in modules if module._buffers]
        return [x for x in _values(held) if x is not None]


def _values(dicts: Sequence[Mapping[str, _T]]) -> list[_T]:
    return [*chain.from_iterable([each.values() for each in dicts])]
