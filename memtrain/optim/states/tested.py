"""Optimizers whose states a preset's rules compress: a list of classes, not of states' names."""

from torch import Tensor
from torch.optim import Optimizer

from memtrain.compressors.base import Keep
from memtrain.optim.states.first_step import SEPARABLE
from memtrain.optim.states.optimizer_hooks import chain

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


def is_tested(optimizer: Optimizer) -> bool:
    """Whether a preset's rules compress the states of an optimizer.

    In another class, a subclass of torch's too, states of the same names may be read in another
    way: an error of 4 bits then spoils all later steps, as in SOAP and D-Adaptation.

    Args:
        optimizer: Any; of one around another, the one inside counts.

    Example:
        >>> import torch
        >>> class Mine(torch.optim.AdamW): ...
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> is_tested(torch.optim.AdamW([weight])), is_tested(Mine([weight]))
        (True, False)
    """
    kind = type(chain(optimizer)[-1])
    return kind in SEPARABLE or f"{kind.__module__}.{kind.__qualname__}" in OF_OTHERS


def keep(param: Tensor, state_name: str) -> Keep:
    """A `choose` for the states of an optimizer that is not tested."""
    return UNTESTED
