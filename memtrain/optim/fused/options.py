"""Checks of the numbers in parameter groups."""

from typing import Any

from torch import Tensor

_TITLES = {
    "lr": "learning rate",
    "eps": "epsilon value",
    "momentum": "momentum value",
    "weight_decay": "weight_decay value",
}


def check_numbers(group: dict[str, Any]) -> None:
    """Raise torch's `ValueError` for negative or NaN options and betas outside [0, 1)."""
    for name, title in _TITLES.items():
        value = group.get(name, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not float(value) >= 0:
            raise ValueError(f"Invalid {title}: {value}; allowed: {name} of at least 0")
    for k, beta in enumerate(group.get("betas", ())):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {k}: {beta}; allowed: [0, 1)")
