"""The saves of a checkpointed module that runs again, held as the choices for its sites say.

torch's checkpointing drops what a module saves, and takes what it saves when it runs again in the
backward by its number. Hooks upon its hooks let it number a payload in place of a tensor.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from memtrain.activations.intercept.reentrancy import top_pair
from memtrain.activations.saved.expected import BETWEEN
from memtrain.activations.saved.handles import Saved
from memtrain.activations.saved.pack_hook import Choose, SavedTensors


class FirstRun(NamedTuple):
    """Parts of a first run that its repetition takes over, besides torch's random stream."""

    module: str
    step: int
    """Forwards before the one that it is of."""
    number: int
    """Runs of the module before it in that forward."""
    choose: Choose
    draws: Mapping[str, int]


class Numbered:
    """A handle with what torch's checkpointing asks of the tensor that it stands for."""

    __slots__ = ("device", "dtype", "handle", "requires_grad", "shape")

    def __init__(self, x: Tensor, handle: Saved) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.requires_grad, self.handle = False, handle

    def unpack(self) -> Tensor:
        """The tensor for the backward."""
        return self.handle.unpack()


class Numbering:
    """Pack hook of a module that runs again: what `saved` holds gets the number of the save.

    Made while torch's own hooks are on top.

    Args:
        saved: Packs.
    """

    def __init__(self, saved: SavedTensors) -> None:
        self._saved, (self._number, _) = saved, top_pair()

    def pack(self, x: Tensor) -> Numbered:
        """The pack function. Torch's raises where no save is left to come."""
        return self._number(Numbered(x, self._saved.pack(x)))


def dropping() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks of a module's first run: torch's, which are on top now, for what `Numbering` packs."""
    drop, find = top_pair()

    def unpack(place: Any) -> Tensor:
        return find(place).unpack()

    return drop, unpack


BETWEEN.add(Numbering.pack.__code__)
