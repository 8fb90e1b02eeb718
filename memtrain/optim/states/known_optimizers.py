"""Known classes of optimizers: which step parameters one at a time, and which presets compress."""

import sys

from torch import Tensor, optim
from torch.optim import Optimizer

from memtrain.compressors.base import Keep
from memtrain.optim.states import layout
from memtrain.optim.states.optimizer_hooks import chain

SEPARABLE: set[type[Optimizer]] = {
    optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW,
    optim.Adamax, optim.Muon, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    optim.SparseAdam,
}  # fmt: skip
"""Optimizers that step each parameter from its own gradient, states and options."""

OF_OTHERS = frozenset({
    "memtrain.optim.fused.lion.Lion",
    "pytorch_optimizer.optimizer.adabelief.AdaBelief",
    "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
    "pytorch_optimizer.optimizer.lamb.Lamb",
    "pytorch_optimizer.optimizer.lion.Lion",
    "pytorch_optimizer.optimizer.tiger.Tiger",
})  # fmt: skip
"""Module and name of tested classes that are not torch's, which need not be installed."""
UNTESTED = Keep("memtrain does not know this optimizer; optim.exceptions that match it compress it")


def is_separable(optimizer: Optimizer) -> bool:
    """Whether an optimizer may step its parameters one at a time, with the same result.

    torch's classes may, and classes with the attribute `separable = True`, as memtrain's. Others,
    subclasses of torch's too, may couple parameters: Prodigy's step size comes from all gradients.
    """
    kind = type(chain(optimizer)[-1])
    return kind in SEPARABLE or getattr(kind, "separable", False)


def is_tested(optimizer: Optimizer) -> bool:
    """Whether a preset's rules compress the states of an optimizer.

    Other classes, subclasses of torch's too, may use states of the same names in another way: an
    error of 4 bits then affects all later steps, as in SOAP and D-Adaptation.
    """
    kind = type(chain(optimizer)[-1])
    if kind in SEPARABLE:
        return True
    # The name only finds the class: another class may have the same name.
    known = f"{kind.__module__}.{kind.__qualname__}" in OF_OTHERS
    return known and getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def default_choice(optimizer: Optimizer) -> layout.Choose:
    """Return the default `choose` of an optimizer: the paper's, its class's own, or `keep`."""
    first = getattr(type(optimizer), "first_default", layout.Choice.first)
    return layout.Choice(first=first) if is_tested(optimizer) else keep


def keep(param: Tensor, state_name: str) -> Keep:
    """Keep all states: the `choose` of an optimizer that is not tested."""
    return UNTESTED
