"""Ways into and out of a model that gradients may take past its outputs and its rounded weights."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

DEPTH = 6  # of objects within an output: a cache of keys and values, say
ENTER = "_EnterBackward"


class Outliving:
    """Tells which tensors of a forward are alive after it without being among its outputs."""

    def __init__(self) -> None:
        self._made: list[tuple[str, weakref.ref[Tensor]]] = []

    def note(self, site: str, result: Any) -> None:
        """An op has made this."""
        for y in result if isinstance(result, tuple | list) else (result,):
            if isinstance(y, Tensor) and y.requires_grad and not isinstance(y, nn.Parameter):
                self._made.append((site, weakref.ref(y)))

    def left(self, output: Any) -> list[str]:
        """The sites of those that are left, once the forward has returned."""
        outputs = list(within(output))
        given = {id(x) for x in (*outputs, *(x._base for x in outputs))}
        found = {}
        for site, ref in self._made:
            y = ref()
            if y is not None and id(y) not in given:
                found[site] = None
        self._made = []
        return list(found)


def within(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors in an object: in containers, and in what its attributes hold.

    Example:
        >>> import torch
        >>> len([*within({"a": [torch.ones(1)], "b": (torch.ones(2), 3)})])
        2
    """
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, str | bytes | type | nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from within(item, depth - 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from within(item, depth - 1)
    elif hasattr(value, "__dict__"):
        yield from within(vars(value), depth - 1)


def past_rounding(outputs: Iterable[Tensor], model: nn.Module) -> list[str]:
    """The parameters that an output leads to on a way that does not go through their rounding.

    Custom autograd Functions and TorchScript modules read them where no op is seen.

    Args:
        outputs: Of a forward.
        model: Names the parameters.

    Returns:
        Names, sorted.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: set[str] = set()
    ahead = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        for above, _ in node.next_functions:
            if above is None or above in seen:
                continue
            seen.add(above)
            if type(above).__name__ == "AccumulateGrad":
                found.add(names.get(id(getattr(above, "variable", None)), ""))
            elif above.name() != ENTER:
                ahead.append(above)
    return sorted(found - {""})
