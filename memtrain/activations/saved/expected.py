"""Saves expected of the own code of each module: what it saved when it was called alike.

Where the next save of a module's own code (its submodules' left out) is known, with all that was
chosen for it, no one need watch the ops. A save is the expected one where the same instruction of
the same code makes it, of an op that the code itself names, and it looks the same.
"""

import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled

from memtrain.activations.saved.bound import Bound
from memtrain.activations.saved.flatten import Layout, Memory
from memtrain.activations.saved.op_names import calls
from memtrain.activations.saved.origin import of_stand_in
from memtrain.activations.saved.site import Op, Site
from memtrain.compressors import Compressor, Keep

BETWEEN: set[CodeType] = set()
"""Code of ours that may stand between an op and who calls it."""
CALLS = 2**12
"""Forms of calls at most whose saves are remembered."""


class Settled(NamedTuple):
    """A choice made for a save of an earlier forward, taken again for saves that are alike."""

    site: Site
    layout: Layout
    key: Memory | None
    chosen: Compressor | Keep
    nothing: Tensor | None
    """Contents of a payload's witness; None where the tensor is kept."""
    bound: Bound | None
    """Its compression, where kernels are known for its form."""


class Expected(NamedTuple):
    """A save of a module's own code."""

    code: CodeType
    instruction: int
    look: tuple[Any, ...]
    origin: type | None
    """Type of the node that made the tensor's memory, where none such gives a parameter's copy."""
    settled: Settled | None
    """None where the tensor is kept anyway: a parameter, an input, what another save keeps."""

    @classmethod
    def of(cls, x: Tensor, settled: Settled | None) -> "Expected":
        """The save that is made now, by an op that is watched."""
        origin = made_by(x)
        told = not of_stand_in(origin) and origin is not type(None)
        return cls(*_where(), look_of(x), origin if told else None, settled)


Running = Iterator[Expected] | list[Expected] | None
"""A module's own code that runs: the saves to come, or those so far; None: they are not told."""


class Expectations:
    """Saves of modules, by how these are called.

    The first settled call of a form is watched, and tells; later ones of that form are as it was. A
    module whose ops were replaced, or that once saved something else, is watched from then on.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[Expected]] = {}
        self._told: dict[Any, list[Expected]] = {}
        self._watched: set[str] = set()
        self._form: Any = None
        self.module = ""
        """The module that runs now."""
        self.due: Iterator[Expected] | None = None
        """The saves to come of its own code; None: its ops are watched."""
        self._saves: list[Expected] | None = None  # of its own code, so far

    def begin(self, form: Any) -> None:
        """Begin a forward; without a form nothing is expected, nor told."""
        self.end(whole=False)
        self._form = form

    def end(self, *, whole: bool) -> None:
        """End a forward; where an exception ended it, what was told is not to be relied on."""
        if whole:
            if len(self._known) + len(self._told) > CALLS:  # shapes that vary collect without end
                self._known.clear()
            self._known.update(self._told)
        self._told.clear()
        self._form, self.due, self._saves = None, None, None

    def forget(self) -> None:
        """Forget the forwards before: other choices are made now."""
        self._known.clear()
        self._told.clear()
        self._watched.clear()

    def call(self, module: str, training: bool, args: Any, kwargs: Any) -> Running:
        """Come to the own code of a module that is called."""
        self.module = module
        self.due, self._saves = None, None
        if self._form is None or module in self._watched:
            return None
        looks: list[Any] = [self._form, module, training, is_grad_enabled()]
        for x in (*args, *kwargs.values()):  # what its saves are likely to depend on
            if isinstance(x, Tensor):
                looks += (x.shape, x.stride(), x.dtype, x.requires_grad)
            elif isinstance(x, bool):
                looks.append(x)
        call = tuple(looks)
        known = self._known.get(call)
        if known is not None:
            self.due = iter(known)
        elif call not in self._told:
            self._saves = self._told[call] = []
        return self.due or self._saves

    def resume(self, module: str, running: Running) -> None:
        """Come back to a module's own code."""
        self.module = module
        self.due, self._saves = None, None
        if isinstance(running, list):
            self._saves = running
        else:
            self.due = running

    @property
    def tells(self) -> bool:
        """Whether the own code that runs tells what it saves."""
        return self._saves is not None

    def tell(self, op: Op, x: Tensor, settled: Settled | None) -> None:
        """Expect this save from now on.

        Args:
            op: What saves.
            x: What is saved.
            settled: What was chosen.
        """
        expected = Expected.of(x, settled)
        if op.module != self.module or not calls(expected.code, expected.instruction, op.name):
            self.watch()
        elif self._saves is not None:
            self._saves.append(expected)

    def watch(self) -> None:
        """Watch the ops of the module that runs from now on."""
        self._watched.add(self.module)
        self.due, self._saves = None, None


def _where() -> tuple[CodeType, int]:
    """The instruction that calls the op which saves now."""
    frame = sys._getframe(3)
    while frame.f_code in BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def made_by(x: Tensor) -> type:
    """Type of the graph's node that made a tensor, of a view what it is one of."""
    base = x._base
    return type((x if base is None else base).grad_fn)


def look_of(x: Tensor) -> tuple[Any, ...]:
    """Form of a tensor: equal where a save is the expected one."""
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad
