"""A step on the CPU as the one before it: of every parameter only the gradient is new."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtrain.kernels import dispatch
from memtrain.kernels.step.split import PLAIN
from memtrain.kernels.step.step import GRADIENT_FIELD, Entry, cpu_table, fits, run_table
from memtrain.kernels.step.update_rules import Scalars

_USUAL = (nn.Parameter, Tensor)
_Groups = Sequence[Mapping[str, Any]]
_States = Mapping[Tensor, Any]


class _Known(NamedTuple):
    """The kernels' table of a parameter and its state; nothing is kept alive by it."""

    shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameter and its gradient
    address: int
    parts: tuple[tuple[str, str | None, int, int], ...]
    """Of each tensor of the state: its name, that within a payload, address and elements."""

    @classmethod
    def of(cls, entry: Entry, state: Mapping[str, Any], names: Sequence[str]) -> "_Known":
        """Read an entry of a parameter with this state of these names."""
        parts: list[tuple[str, str | None, int, int]] = []
        for name in names:
            value = state[name]
            payload = value.items() if isinstance(value, dict) else [(None, value)]
            parts += [(name, key, t.data_ptr(), t.numel()) for key, t in payload]
        param = entry.param
        dtypes = param.dtype, entry.grad.dtype
        return cls(param.shape, dtypes, param.data_ptr(), tuple(parts))

    def gradient(self, param: Tensor, state: Mapping[str, Any]) -> int:
        """The new gradient's address; -1 where anything but that is new."""
        shape, dtypes, address, parts = self
        grad = param.grad
        if grad is None or type(grad) not in _USUAL or grad.layout is not torch.strided:
            return -1
        if param.data_ptr() != address or (param.dtype, grad.dtype) != dtypes:
            return -1
        if param.shape != shape or grad.shape != shape:
            return -1
        if not param.is_contiguous() or not grad.is_contiguous():
            return -1
        for name, key, place, size in parts:
            part = state.get(name)
            if key is not None:
                part = part.get(key) if type(part) is dict else None
            if not isinstance(part, Tensor) or part.data_ptr() != place or part.numel() != size:
                return -1
        return grad.data_ptr()


class StepAgain:
    """The table of a step that one C++ call made, and what tells whether it still holds.

    Args:
        entries: Of the step, of every parameter that had a gradient, in order.
        groups: The optimizer's.
        states: Its states, by parameter.
        names: Of the states, of each group.

    Memory:
        A row of 256 bytes for each parameter; no tensor is kept alive.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        groups: _Groups,
        states: _States,
        names: Sequence[Sequence[str]],
    ) -> None:
        self.names = [*names]
        self._known: list[_Known | None] = []
        given = iter(entries)
        for group, own in zip(groups, names, strict=True):
            for param in group["params"]:
                state = states.get(param, {})
                entry = None if param.grad is None else next(given)
                self._known.append(None if entry is None else _Known.of(entry, state, own))
        # No tensor: audits count those that an optimizer holds as its states.
        self._table = cpu_table(entries).numpy()

    @classmethod
    def serves(cls, entries: Sequence[Entry], groups: _Groups) -> bool:
        """Whether one C++ call steps these entries, which are all that have a gradient."""
        given = [param for group in groups for param in group["params"] if param.grad is not None]
        return len(given) == len(entries) > 0 and all(
            entry.param is param
            and not hasattr(param, "_stands_for")  # what does lives for one step
            and param.numel() > 0
            and entry.master is PLAIN
            and entry.guard is None
            and entry.shard is None
            and not isinstance(entry.scalars, Tensor)
            and dispatch.choose(param) == "cpu"
            and fits(entry)
            and entry.grad.is_contiguous()
            for entry, param in zip(entries, given, strict=True)
        )

    def gradients(
        self, groups: _Groups, states: _States, names: Sequence[Sequence[str]]
    ) -> list[int] | None:
        """The gradients' addresses in a step that is as this one; None where anything differs.

        Args:
            groups: The optimizer's, as then.
            states: Its states, by parameter.
            names: Of the states, of each group.
        """
        params = [param for group in groups for param in group["params"]]
        same = self.names == [*names] and len(params) == len(self._known)
        if not same or dispatch.forced not in (None, "cpu"):
            return None
        found: list[int] = []
        for param, known in zip(params, self._known, strict=True):
            if known is None:
                if param.grad is not None:
                    return None
                continue
            gradient = known.gradient(param, states.get(param) or {})
            if gradient < 0:
                return None
            found.append(gradient)
        return found

    def run(self, gradients: Sequence[int], scalars: Sequence[Scalars | Tensor]) -> None:
        """Step with the gradients at these addresses, and the scalars of each parameter."""
        self._table[:, GRADIENT_FIELD] = gradients
        run_table(torch.from_numpy(self._table), scalars)
