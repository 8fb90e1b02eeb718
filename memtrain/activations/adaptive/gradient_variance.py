"""The variance of the gradient from one batch to the next, seen while training goes on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Spread:
    """Watches some elements of every gradient over a few successive backward passes.

    The variance of the whole gradient, summed over its elements, is estimated without bias from
    `elements` of each parameter, drawn at random: gradients are neither kept nor copied. Weights
    move a little between the passes, and of gradients that are accumulated each backward counts
    alone.

    Args:
        passes: Backward passes, two or more.
        elements: Of each parameter, or all where it has no more.

    Memory:
        12 bytes per element watched, and 4 for each pass.

    Example:
        >>> weight, spread = nn.Parameter(torch.zeros(4)), Spread(passes=2)
        >>> spread.begin([weight])
        >>> for scale in (1.0, 3.0):
        ...     (scale * weight).sum().backward()
        ...     done = spread.next()
        >>> done, spread.variance()
        (True, 8.0)
    """

    def __init__(self, *, passes: int = 8, elements: int = 256) -> None:
        self.passes, self.elements = passes, elements
        self._clear()

    def __getstate__(self) -> dict[str, object]:
        return {"passes": self.passes, "elements": self.elements}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def _clear(self) -> None:
        self._handles: list[Any] = []
        self._scales: list[float] = []
        self._now: dict[int, Tensor] = {}  # parameter -> its elements, of the present pass
        self._seen: list[dict[int, Tensor]] = []

    @property
    def running(self) -> bool:
        """Whether it watches."""
        return bool(self._handles)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch the next backward passes; what was seen before is forgotten.

        Args:
            parameters: Those that train are watched.
        """
        self.stop()
        self._clear()
        generator = torch.Generator().manual_seed(0)
        for param in parameters:
            if not param.requires_grad or param.numel() == 0:
                continue
            n = min(self.elements, param.numel())
            drawn = torch.randint(param.numel(), (n,), generator=generator)
            places = (torch.arange(n) if n == param.numel() else drawn).to(param.device)
            hook = _Hook(self._now, len(self._scales), places)
            self._scales.append(param.numel() / n)
            self._handles.append(param.register_hook(hook))

    def next(self) -> bool:
        """Between two backward passes: whether all have been seen, and it has stopped."""
        if self._now:
            self._seen.append(dict(self._now))
            self._now.clear()
        if len(self._seen) < self.passes:
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def variance(self) -> float:
        """Of the whole gradient, in its units squared; a pass without a gradient counts as 0."""
        total = 0.0
        for index, scale in enumerate(self._scales):
            rows = [seen[index] for seen in self._seen if index in seen]
            if rows:
                missing = len(self._seen) - len(rows)
                values = torch.stack([*rows, *[torch.zeros_like(rows[0])] * missing])
                total += scale * float(values.double().var(0).sum())
        return total


class _Hook:
    """Notes some elements of one parameter's gradient."""

    def __init__(self, found: dict[int, Tensor], index: int, places: Tensor) -> None:
        self.found, self.index, self.places = found, index, places

    def __call__(self, grad: Tensor) -> None:
        if type(grad) is not Tensor:  # sharded: of a part, nothing is said of the whole
            return
        own = grad.detach().reshape(-1)[self.places].float()
        known = self.found.get(self.index)
        self.found[self.index] = own if known is None else known + own
