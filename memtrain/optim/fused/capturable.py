"""Options of parameter groups: allowed numbers, and `capturable=True` for CUDA graphs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.kernels.dispatch import is_for_cuda
from memtrain.kernels.step import cuda_graph
from memtrain.kernels.step.update_rules import Number

DEVICES = ("cuda",)


def check(owner: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise before a step that `capturable` does not fit.

    Args:
        owner: The optimizer's name.
        groups: Its parameter groups.

    Raises:
        ValueError: For a parameter that is stepped and that no graph can hold.
        RuntimeError: Inside a capture, unless all groups are capturable.
    """
    inside = cuda_graph.capturing()
    for group in groups:
        if not group.get("capturable"):
            if inside:
                raise RuntimeError(
                    f"step() of {owner} is captured into a graph, but a parameter group has "
                    "capturable=False: its numbers would be those of this step forever"
                )
            continue
        for param in group["params"]:
            serves = param.device.type in DEVICES or is_for_cuda(param)
            if param.grad is not None and not serves:
                raise ValueError(
                    f"capturable=True needs parameters on {' or '.join(DEVICES)}, got one of shape "
                    f"{tuple(param.shape)} on {param.device.type}: leave it out there"
                )


def stays_on_device(group: Mapping[str, Any], value: Any) -> bool:
    """Whether an option must not be read on the host: a graph reads it anew at each replay."""
    return bool(
        group.get("capturable") and isinstance(value, Tensor) and value.device.type in DEVICES
    )


_TITLES = {"lr": "learning rate", "eps": "epsilon value"}


def check_numbers(group: dict[str, Any], names: Sequence[str]) -> None:
    """Raise, in torch's words, for options that must not be negative; NaN is refused too."""
    for name in names:
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        if not stays_on_device(group, value) and not float(value) >= 0:
            title = _TITLES.get(name, f"{name} value")
            raise ValueError(f"Invalid {title}: {value}; allowed: {name} of at least 0")


def check_betas(group: dict[str, Any]) -> None:
    """Raise, in torch's words, for betas outside [0, 1)."""
    for k, beta in enumerate(group["betas"]):
        if not stays_on_device(group, beta) and not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {k}: {beta}; allowed: [0, 1)")


def number(group: Mapping[str, Any], value: Any) -> Number:
    """An option as the makers of `kernels.step.update_rules` take it."""
    return value.detach().double() if stays_on_device(group, value) else float(value)


def options_on(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A group's options for parameters of a device, on which those are that may not be read."""

    def moved(value: Any) -> Any:
        return value.to(device) if stays_on_device(group, value) else value

    return {
        name: tuple(map(moved, value)) if isinstance(value, tuple) else moved(value)
        for name, value in group.items()
    }


class Ticks:
    """A count of steps; where it is read on a device, graphs count too.

    Args:
        count: Where it starts.

    Example:
        >>> ticks = Ticks(4)
        >>> ticks.advance()
        >>> int(ticks), ticks.on(torch.device("cpu"))
        (5, tensor(5))
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The count on a device, int64: always the same tensor."""
        if device not in self._on:
            self._on[device] = torch.tensor(self._count, device=device)
        return self._on[device]

    def advance(self) -> None:
        """One step more."""
        self._count += 1
        for tick in self._on.values():
            tick.add_(1)

    def set(self, count: int) -> None:
        """Go on from another count."""
        self._count = count
        for tick in self._on.values():
            tick.fill_(count)

    def __int__(self) -> int:
        for tick in self._on.values():
            return int(tick)
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {"_count": int(self), "_on": {}}
