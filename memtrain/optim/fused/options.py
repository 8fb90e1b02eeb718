"""Checks of the numbers in parameter groups."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_TITLES = {"lr": "learning rate", "eps": "epsilon value"}


def check_numbers(group: dict[str, Any], names: Sequence[str]) -> None:
    """Raise `ValueError`, in torch's words, for options that are negative or NaN."""
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not float(value) >= 0:
            title = _TITLES.get(name, f"{name} value")
            raise ValueError(f"Invalid {title}: {value}; allowed: {name} of at least 0")


def check_betas(group: dict[str, Any]) -> None:
    """Raise `ValueError`, in torch's words, for betas outside [0, 1)."""
    for k, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {k}: {beta}; allowed: [0, 1)")
