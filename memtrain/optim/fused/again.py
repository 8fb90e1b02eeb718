"""A step on the CPU as the one before it: of every parameter only the gradient is new."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.kernels import cpu, dispatch
from memtrain.kernels.step.split import PLAIN
from memtrain.kernels.step.step import GRADIENT_FIELD, Entry, cpu_table, fits, run_table
from memtrain.kernels.step.update_rules import Scalars

_USUAL, _DENSE = {nn.Parameter, Tensor}, {torch.strided}
_Groups = Sequence[Mapping[str, Any]]
_States = Mapping[Tensor, Any]


class StepAgain:
    """The table of a step that one C++ call made, and what tells whether it still holds.

    Args:
        entries: Of the step, of every parameter that had a gradient, in order.
        groups: The optimizer's.
        states: Its states, by parameter.
        names: Of the states, of each group.

    Memory:
        A row of 256 bytes for each parameter, and some numbers; no tensor is kept alive.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        groups: _Groups,
        states: _States,
        names: Sequence[Sequence[str]],
    ) -> None:
        # No tensors: audits count those that an optimizer holds as its states.
        self._table = cpu_table(entries).numpy()
        params, gradients = _given(groups)
        self._form = _form(params, gradients, states, names)
        counters = [(states.get(param) or {}).get("step") for param in params]
        self._counters = np.array(
            [x.data_ptr() for x in counters if isinstance(x, Tensor) and x.dtype == torch.float32]
        )

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
        if self._form is None or dispatch.forced not in (None, "cpu"):
            return None
        params, gradients = _given(groups)
        if _form(params, gradients, states, names) != self._form:
            return None
        return [*map(Tensor.data_ptr, gradients)]

    def count(self) -> list[float] | None:
        """Count a step of each parameter, where all have a counter of float32; None elsewhere."""
        if len(self._counters) != len(self._table):
            return None
        counts = torch.empty(len(self._counters), dtype=torch.float32, device="cpu")
        cpu.call("mt_count_step", torch.from_numpy(self._counters), counts, len(counts))
        return counts.tolist()

    def run(self, gradients: Sequence[int], scalars: Sequence[Scalars | Tensor]) -> None:
        """Step with the gradients at these addresses, and the scalars of each parameter."""
        self._table[:, GRADIENT_FIELD] = gradients
        run_table(torch.from_numpy(self._table), scalars)


def _given(groups: _Groups) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, and these."""
    params = [param for group in groups for param in group["params"]]
    gradients = [param.grad for param in params]
    if all(gradient is not None for gradient in gradients):
        return params, gradients
    pairs = [(x, grad) for x, grad in zip(params, gradients, strict=True) if grad is not None]
    return [x for x, _ in pairs], [grad for _, grad in pairs]


def _form(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: _States,
    names: Sequence[Sequence[str]],
) -> tuple[list[Any], ...] | None:
    """Equal for steps whose tables are, but for gradients; None where none may be kept.

    Tensor by tensor these few questions would take as long as the step of a small model.
    """
    own = [*states.values()]
    if not {*map(type, own)} <= {dict} or not {*map(type, gradients)} <= _USUAL:
        return None
    values = [*chain.from_iterable(map(dict.values, own))]
    payloads = [value for value in values if type(value) is dict]
    tensors = [value for value in values if type(value) is not dict]
    tensors += chain.from_iterable(map(dict.values, payloads))
    if not {*map(type, tensors)} <= _USUAL or not {x.layout for x in gradients} <= _DENSE:
        return None
    if not all(map(Tensor.is_contiguous, chain(params, gradients))):
        return None
    return (
        [*names],
        [*map(id, chain(params, states))],
        [x.dtype for x in chain(params, gradients)],
        [x.shape for x in chain(params, gradients)],
        [*map(Tensor.data_ptr, params)],
        [*map(type, values)],
        [*map(len, chain(own, payloads))],
        [*chain.from_iterable(chain(own, payloads))],
        [*map(Tensor.data_ptr, tensors)],
        [*map(Tensor.numel, tensors)],
    )
