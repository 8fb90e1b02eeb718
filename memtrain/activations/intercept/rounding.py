"""Protocol of what rounds, or records, the weights and results of a forward's ops."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from memtrain.activations.saved.pack import SavedTensors


class Rounding(Protocol):
    """Is handed every op's arguments and results. Views and questions pass through it too."""

    def attach(self, saved: SavedTensors) -> None:
        """What the forwards save for backward will be packed by `saved`."""
        ...

    def begin(self, model: nn.Module, module: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The outermost forward begins, from `module`; gives its arguments."""
        ...

    def arguments(
        self, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A torch function of this `__name__` begins; gives its arguments."""
        ...

    def function(
        self, func: Any, module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What runs in its place on these arguments, saving the same tensors: mostly itself."""
        ...

    def result(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """It has run, as the op of this name in sites; gives its result."""
        ...

    def end(self, output: Any, *, whole: bool) -> Any:
        """The outermost forward ends, unless an exception ended it (`whole` is False)."""
        ...
