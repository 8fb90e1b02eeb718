"""Which numbers a parameter group may hold."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memtrain.optim.fused.capturable import stays_on_device


def check_numbers(group: dict[str, Any], names: Sequence[str]) -> None:
    """Raise for options that must not be negative; NaN is refused too."""
    for name in names:
        if isinstance(group[name], Tensor) and group[name].numel() != 1:
            raise ValueError(f"{name} must have one element, got {tuple(group[name].shape)}")
        if not stays_on_device(group, group[name]) and not float(group[name]) >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")


def check_betas(group: dict[str, Any]) -> None:
    """Raise for betas outside [0, 1)."""
    for k, beta in enumerate(group["betas"]):
        if not stays_on_device(group, beta) and not 0 <= beta < 1:
            raise ValueError(f"betas[{k}] must be in [0, 1), got {beta}")
