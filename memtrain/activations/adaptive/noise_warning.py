"""Quantisation noise beside the gradient's own variance from batch to batch, and its warning."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

THRESHOLD = 0.1
"""A share of the gradient's variance above which a warning is due (GACT's bound)."""
_WORST = 3


class GradientVariance:
    """Estimates the gradient's variance from batch to batch over a few backward passes.

    The variance of the whole gradient, summed over its elements, is estimated without bias from
    `elements` of each parameter, drawn at random: gradients are neither kept nor copied. Weights
    move a little between the passes, and of gradients that are accumulated each backward counts
    alone.

    Args:
        passes: Backward passes, two or more.
        elements: Of each parameter, or all where it has no more.

    Memory:
        12 bytes per sampled element, and 4 for each pass.

    Example:
        >>> weight, variance = nn.Parameter(torch.zeros(4)), GradientVariance(passes=2)
        >>> variance.begin([weight])
        >>> for scale in (1.0, 3.0):
        ...     (scale * weight).sum().backward()
        ...     done = variance.next()
        >>> done, variance.estimate()
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
        """Whether hooks are on the parameters."""
        return bool(self._handles)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hook parameters that train for the next backward passes; forget earlier ones."""
        self.stop()
        self._clear()
        generator = torch.Generator("cpu").manual_seed(0)
        for param in parameters:
            if not param.requires_grad or param.numel() == 0:
                continue
            n = min(self.elements, param.numel())
            drawn = torch.randint(param.numel(), (n,), generator=generator, device="cpu")
            indices = (torch.arange(n, device="cpu") if n == param.numel() else drawn).to(
                param.device
            )
            hook = partial(_sample, self._now, len(self._scales), indices)
            self._scales.append(param.numel() / n)
            self._handles.append(param.register_hook(hook))

    def next(self) -> bool:
        """End a backward pass.

        Returns:
            Whether it was the last one; the hooks are off then.
        """
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

    def estimate(self) -> float:
        """Give the variance of the whole gradient; a pass without a gradient counts as zeros."""
        total = 0.0
        for index, scale in enumerate(self._scales):
            rows = [seen[index] for seen in self._seen if index in seen]
            if rows:
                missing = len(self._seen) - len(rows)
                values = torch.stack([*rows, *[torch.zeros_like(rows[0])] * missing])
                total += scale * float(values.double().var(0).sum())
        return total


def _sample(found: dict[int, Tensor], index: int, indices: Tensor, grad: Tensor) -> None:
    """Note some elements of one parameter's gradient."""
    if type(grad) is not Tensor:  # sharded: of a part, nothing is known of the whole
        return
    own = grad.detach().reshape(-1)[indices].float()
    known = found.get(index)
    found[index] = own if known is None else known + own


def expected_noise(sensitivities: Sequence[float], widths: Sequence[int]) -> float:
    """Predict the gradient variance that a site's widths add.

    Args:
        sensitivities: Of its samples: the variance at 1 bit of each.
        widths: Of its samples, most first; or of equal parts of them.

    Example:
        >>> expected_noise([1.0, 9.0], (2, 1))
        2.0
    """
    shares = [1 / (2**b - 1) ** 2 for b in widths]
    if len(shares) == len(sensitivities):
        pairs = zip(sorted(sensitivities, reverse=True), shares, strict=True)
        return sum(c * share for c, share in pairs)
    return sum(sensitivities) * sum(shares) / len(shares)


def noise_warning(
    noise: Mapping[str, float],
    reference: float,
    name: str,
    remedy: str,
    total: float | None = None,
) -> str:
    """Word the warning of too much quantisation noise; empty where there is little.

    Args:
        noise: The variance that each site adds to the gradient, in any unit.
        reference: The variance or norm that it is compared to, in the same unit.
        name: Of the reference: the gradient's `name`.
        remedy: A change that lowers the noise.
        total: The variance of all sites together, where it is known; else their sum.

    Returns:
        The share of all sites together, the worst sites with theirs, and the remedy.

    Example:
        >>> noise = {"a / linear / input": 1.0, "b / linear / input": 3.0}
        >>> noise_warning(noise, 16.0, "variance", "8 bits")
        "quantisation noise of the saved activations is 25% of the gradient's variance, most of it
        from b / linear / input (19%), a / linear / input (6%); 8 bits would lower it"
        >>> noise_warning({"a / linear / input": 1.0}, 16.0, "variance", "8 bits")
        ''
    """
    total = sum(noise.values()) if total is None else total
    if not total > THRESHOLD * reference:  # nor where either is NaN
        return ""

    def share(value: float) -> str:
        return f"{value / reference:.0%}" if reference else "more than 100%"

    worst = sorted(noise, key=lambda site: -noise[site])[:_WORST]
    named = ", ".join(f"{site} ({share(noise[site])})" for site in worst)
    return (
        f"quantisation noise of the saved activations is {share(total)} of the gradient's {name}, "
        f"most of it from {named}; {remedy} would lower it"
    )
