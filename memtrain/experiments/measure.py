"""What a training run keeps alive, by category."""

from dataclasses import dataclass, fields

import torch

from memtrain.audit.live_storages import storage_nbytes
from memtrain.audit.live_tensors import gradient_tensors, state_tensors, weight_tensors

__all__ = ["Bytes", "gradient_tensors", "measure_states", "state_tensors", "weight_tensors"]


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes alive on a real step; each the highest seen.

    Example:
        >>> Bytes(weights=8, states=16).highest(Bytes(states=4, saved=2)).total
        26
    """

    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    """`.grad` after the backward."""
    states: int = 0
    """What the optimizer holds."""
    saved: int = 0
    """Saved activations: what the forward and the loss leave alive, besides the loss."""
    peak: int = 0
    """The most alive at once at any moment of a step, temporaries included."""

    @property
    def total(self) -> int:
        """The four categories together."""
        return self.weights + self.gradients + self.states + self.saved

    def highest(self, other: "Bytes") -> "Bytes":
        """The higher of both, field by field."""
        pairs = {
            item.name: max(getattr(self, item.name), getattr(other, item.name))
            for item in fields(self)
        }
        return Bytes(**pairs)


def measure_states(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the distinct storages that an optimizer holds."""
    return storage_nbytes(state_tensors(optimizer))
