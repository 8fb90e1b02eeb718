"""The tensors that a forward makes, each with the name of its site."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.saved.origin import foreign, storage_id
from memtrain.activations.saved.site import Site
from memtrain.kernels.floats.rounding import DTYPES
from memtrain.precision.ops import MOVES, tensors


class Made(NamedTuple):
    """A tensor that the forward has made."""

    name: str
    tensor: Tensor
    in_place: bool


class Values:
    """Names what the ops of one forward make, and remembers by its storage what came from where.

    A tensor of training is a floating-point result of an op with memory of its own: views,
    copies and casts are the tensor that they come from, and single numbers (losses) are left out.
    Names are `module / op / output`, then `output1` and on where a module runs an op again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A forward begins or ends: all storages are forgotten."""
        self._calls: Counter[tuple[str, str]] = Counter()
        # Held, so that no other storage takes the same id while the forward runs.
        self._owner: dict[int, tuple[StorageWeakRef, str]] = {}
        self._versions: dict[int, int] = {}
        self._parameters: dict[int, str] = {}

    def begin(self, model: nn.Module) -> None:
        """A forward begins; parameters are those that the model has now (a trace has its own)."""
        self.clear()
        for name, parameter in model.named_parameters():
            self._parameters[id(parameter)] = name

    def parameter(self, x: Tensor) -> str:
        """The name of the parameter that `x` is or is a view of, or an empty string."""
        return self._parameters.get(id(x if x._base is None else x._base), "")

    def name_of(self, x: Tensor) -> str:
        """The site whose elements `x` holds, or an empty string."""
        found = self._owner.get(storage_id(x))
        return found[1] if found else ""

    def upcoming(self, module: str, op: str) -> str:
        """The name that the next result of an op will get."""
        return Site(module, op, f"output{self._calls[module, op] or ''}").name

    def inputs(self, module: str, values: Any) -> list[Made]:
        """The inputs of the outermost module that are tensors of training."""
        found = []
        for x in tree_leaves(values):
            if isinstance(x, Tensor) and roundable(x):
                found.append(self._made(module, "input", x, in_place=False, role="input"))
        return found

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An op begins: what it reads."""
        self._versions = {id(x): _version(x) for x in tensors(args, kwargs)}

    def made(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> list[Made]:
        """What the op that `before` was told of has made."""
        given = list(tensors(args, kwargs))
        read = {storage_id(x) for x in given}
        found = []
        for y in _results(result):
            changed = id(y) in self._versions and _version(y) != self._versions[id(y)]
            if storage_id(y) in read and not changed:
                continue
            if op in MOVES and given:
                self._follow(y, given[0])
            elif roundable(y):
                found.append(self._made(module, op, y, in_place=changed))
        if op == "setitem" and given:
            self.forget(given[0])
        return found

    def own(self, x: Tensor, name: str) -> None:
        """Let the storage of `x` stand for a site."""
        self._owner[storage_id(x)] = (StorageWeakRef(x.untyped_storage()), name)

    def forget(self, x: Tensor) -> None:
        """The storage of `x` holds no site's elements any more."""
        self._owner.pop(storage_id(x), None)

    def _follow(self, y: Tensor, x: Tensor) -> None:
        name = self.name_of(x) or self.parameter(x)
        if name and not foreign(y):
            self.own(y, name)

    def _made(
        self, module: str, op: str, x: Tensor, *, in_place: bool, role: str = "output"
    ) -> Made:
        call = self._calls[module, op]
        self._calls[module, op] += 1
        name = Site(module, op, f"{role}{call or ''}").name
        self.own(x, name)
        return Made(name, x, in_place)


def roundable(x: Tensor) -> bool:
    """Whether a tensor is of a kind that formats are for: floats, more than one of them.

    Example:
        >>> roundable(torch.ones(2)), roundable(torch.tensor(1.0)), roundable(torch.tensor([1, 2]))
        (True, False, False)
    """
    return x.dtype in DTYPES and x.numel() > 1 and not foreign(x)


def _results(result: Any) -> Iterable[Tensor]:
    values = result if isinstance(result, tuple | list) else (result,)
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
        elif isinstance(value, tuple | list):
            yield from _results(value)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
