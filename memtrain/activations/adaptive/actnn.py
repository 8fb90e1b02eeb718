"""ActNN's sensitivities: from what a forward saves and the gradient that its backward brings."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from memtrain.activations.adaptive.bit_widths import Bits, Need
from memtrain.activations.adaptive.gradient_variance import Spread
from memtrain.activations.adaptive.noise_warning import complaint, expected
from memtrain.activations.saved.site import Op, Site
from memtrain.compressors.samples import sensitivity


@dataclass
class _Use:
    """One op that reads a saved tensor in its backward."""

    factor: float  # (K / 4g) (G / P), see `Statistics`
    weight: bool  # whether C bounds the variance of a weight's gradient
    gradient: Tensor | None = None  # |dy|**2 of each sample, or [1]: of all together


@dataclass
class _Save:
    """One saved tensor."""

    site: str
    ranges: Tensor  # [samples]
    size: float  # elements of a sample
    uses: list[_Use] = field(default_factory=list)


class Statistics:
    """Watches every `interval`-th forward and its backward, and solves the bits again after it.

    The sensitivity of sample n of a saved tensor is `C_n = K / (4 g) * G / P * R_n * S`, with K the
    size of the convolution's kernel (1 for other ops), g its groups, G the elements of a
    quantisation group, P the positions that share a weight (pixels, tokens), R_n the sum over the
    sample's groups of (max - min)**2, and S the mean over samples of the squared norm of the
    gradient of the op's output. A tensor that several ops read has the sum over them. For a linear
    layer or a convolution, C_n / (2**b - 1)**2 bounds the variance that rounding to b bits brings
    into the weight's gradient; for other ops it is a heuristic.

    Args:
        bits: What is solved again.
        interval: Forwards from one measurement to the next.
        per_sample: Whether S is each sample's own, remembered over the whole data set: a sample is
            known again by a hash of its slice of the model's first input, its squared norms are
            averaged half and half with the earlier ones, and an unseen sample counts as the mean of
            those seen. Every forward is watched then, and waited for.
        parameters: Gives the model's, whose gradients' variance the bits' is compared to.

    Warns:
        UserWarning: Some steps after the bits were solved, if the variance that they bring to the
            weights of linear layers and convolutions is above 10% of the gradient's own from one
            batch to the next.

    Memory:
        While it watches, 4 bytes per sample and saved tensor; with `per_sample`, one number per
        sample of the data set and site, in host memory.

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4; its code's `use_gradient`.
    """

    def __init__(
        self,
        bits: Bits,
        interval: int,
        *,
        per_sample: bool = False,
        parameters: Callable[[], Iterable[nn.Parameter]] = tuple,
    ) -> None:
        self.bits, self.interval, self.per_sample = bits, interval, per_sample
        self.parameters, self.spread = parameters, Spread()
        self.noise: dict[str, float] = {}
        """Expected variance of the gradient by site, with the present bits."""
        self.table: dict[str, dict[int, float]] = {}  # site -> sample's hash -> S
        self._reset()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    def _reset(self) -> None:
        self._watching = self._due = False
        self._saves: list[_Save] = []
        self._by_payload: WeakKeyDictionary[Any, _Save] = WeakKeyDictionary()
        self._pending: list[tuple[_Save, Tensor]] = []
        self._hashes: list[int] = []

    def begin(self, step: int, inputs: Iterable[Any]) -> bool:
        """A forward starts: what the last watched one and its backward told is used now.

        Args:
            step: Forwards so far.
            inputs: The model's inputs.

        Returns:
            Whether the bits have been solved again.
        """
        solved = self.flush()
        if self.spread.running and self.spread.next():
            self._warn()
        if solved and self.noise and not self.spread.running:
            self.spread.begin(self.parameters())
        due = step % self.interval == 0
        if not self._saves or due:  # else a backward that is still to come is waited for
            self._reset()
            self._watching, self._due = due or self.per_sample, due
        else:
            self._watching = False
        if self.per_sample:
            self._remember(inputs)
        return solved

    def flush(self) -> bool:
        """Solve the bits with what has been measured, if a backward has been seen."""
        seen = any(use.gradient is not None for save in self._saves for use in save.uses)
        if not seen:
            return False
        if self.per_sample:
            self._learn()
        if self._due:
            self.bits.solve(self._needs())
            # rounding a uniform value brings 1/6 of a step squared on average, where C has 1/4
            self.noise = {
                site: 4 / 6 * expected(need, self.bits.widths[site])
                for site, need in self._needs(weights=True).items()
            }
        solved = self._due
        self._reset()
        return solved

    def saved(self, site: Site, x: Tensor, payload: Any = None) -> None:
        """An op saves `x`, as a payload that others may share."""
        auto = self.bits.autos.get(site.name)
        if not self._watching or auto is None or isinstance(x, FakeTensor):
            return
        known = None if payload is None else self._by_payload.get(payload)
        if known is None:
            with torch.no_grad():
                ranges = sensitivity(x, auto.group_size)
            known = _Save(site.name, ranges, x.numel() / max(1, len(ranges)))
            self._saves.append(known)
            if payload is not None:
                self._by_payload[payload] = known
        elif known.site != site.name:
            self.bits.leaders[site.name] = known.site
        self._pending.append((known, x))

    def after(self, op: Op, result: Any) -> None:
        """The op has run: the gradient of its result belongs to what it saved."""
        pending, self._pending = self._pending, []
        results = result if isinstance(result, tuple | list) else (result,)
        y = next((y for y in results if isinstance(y, Tensor) and y.requires_grad), None)
        if not pending or y is None:
            return
        for save, x in pending:
            auto = self.bits.autos[save.site]
            weight = op.name in ("linear", "addmm") or op.name.startswith("conv")
            use = _Use(_factor(op, x, y, auto.group_size), weight)
            save.uses.append(use)
            y.register_hook(_observer(use, len(save.ranges)))

    def state(self) -> dict[str, Any]:
        """Plain dicts that `load` takes."""
        return {site: dict(row) for site, row in self.table.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self.table = {site: dict(row) for site, row in state.items()}
        self._reset()

    def _warn(self) -> None:
        of = "variance from batch to batch"
        if text := complaint(self.noise, self.spread.variance(), of, "more average_bits"):
            warnings.warn(text, stacklevel=2)

    def _needs(self, *, weights: bool = False) -> dict[str, Need]:
        found: dict[str, tuple[list[float], list[float]]] = {}
        for save in self._saves:
            uses = [use for use in save.uses if use.weight or not weights]
            costs = _costs(save, uses, per_sample=self.per_sample)
            if weights:  # G counts the zeros that fill a sample's last group
                filled = save.size / self.bits.autos[save.site].group_size
                costs = [c * filled / ceil(filled) for c in costs]
            if not costs:
                continue
            sensitivities, sizes = found.setdefault(save.site, ([], []))
            if self.bits.autos[save.site].per_sample:
                sensitivities += costs
                sizes += [save.size] * len(costs)
            else:
                sensitivities.append(sum(costs))
                sizes.append(save.size * len(costs))
        return {
            site: Need(*rows) if self.bits.autos[site].per_sample else _total(*rows)
            for site, rows in found.items()
        }

    # -- the table of samples ---------------------------------------------------------------

    def _remember(self, inputs: Iterable[Any]) -> None:
        """Whose samples the present batch has, and the weights that follow."""
        first = next((x for x in inputs if isinstance(x, Tensor) and x.dim()), None)
        hashes = content_hashes(first) if first is not None else []
        if self._watching:
            self._hashes = hashes
        self.bits.weights = {}
        for site, row in self.table.items():
            mean = sum(row.values()) / len(row)
            self.bits.weights[site] = tuple(row.get(h, mean) for h in hashes)

    def _learn(self) -> None:
        for save in self._saves:
            norms = [use.gradient for use in save.uses if use.gradient is not None]
            own = [norm for norm in norms if len(norm) == len(self._hashes) == len(save.ranges)]
            if not own:
                continue
            row = self.table.setdefault(save.site, {})
            for sample, new in zip(self._hashes, sum(own[1:], own[0]).tolist(), strict=True):
                row[sample] = 0.5 * (row[sample] + new) if sample in row else new


def content_hashes(x: Tensor) -> list[int]:
    """A number for each sample that depends on its elements alone, not on its place.

    Args:
        x: At least 1-d, any dtype; its leading dimension counts samples.

    Returns:
        64-bit integers, equal for equal slices.

    Example:
        >>> content_hashes(torch.tensor([[1, 2], [2, 1], [1, 2]]))[::2] == [
        ...     content_hashes(torch.tensor([[1, 2]]))[0]] * 2
        True
    """
    n_samples = x.shape[0]
    if x.numel() == 0:
        return [0] * n_samples
    rows = x.detach().reshape(n_samples, x[:1].numel()).contiguous()
    rows = rows.view(torch.uint8) if rows.dtype != torch.bool else rows.to(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)
    # Odd factors that look random: equal words at other places give other sums (mod 2**64).
    place = torch.arange(1, rows.shape[1] + 1, device=x.device)
    factors = (place * -7046029254386353131) ^ ((place * -4417276706812531889) >> 29)
    mixed = (rows ^ (rows >> 31)) * (factors | 1)
    return (mixed ^ (mixed >> 29)).sum(1).tolist()


def _observer(use: _Use, n_samples: int) -> Any:
    def observe(grad: Tensor) -> None:
        dy = grad.detach()
        own = n_samples if dy.dim() and dy.shape[0] == n_samples else 1
        norms = dy.reshape(own, -1).float().square().sum(1) if dy.numel() else dy.new_zeros(own)
        use.gradient = norms if use.gradient is None else use.gradient + norms

    return observe


def _costs(save: _Save, uses: Sequence[_Use], *, per_sample: bool) -> list[float]:
    """C of each sample, by some of the uses; none if no gradient came."""
    n_samples, factors = len(save.ranges), []
    for use in uses:
        if use.gradient is not None:
            own = per_sample and len(use.gradient) == n_samples
            norms = use.gradient if own else use.gradient.sum() / max(1, n_samples)
            factors.append(use.factor * norms)
    return (save.ranges * sum(factors[1:], factors[0])).tolist() if factors else []


def _total(sensitivities: Sequence[float], sizes: Sequence[float]) -> Need:
    """Of a site whose calls have one width."""
    return Need([sum(sensitivities)], [sum(sizes)])


def _factor(op: Op, x: Tensor, y: Tensor, group_size: int) -> float:
    """K / (4 g) * G / P."""
    kernel, groups, positions = 1, 1, 1
    weight = op.inputs[1] if len(op.inputs) > 1 else None
    if op.name.startswith("conv") and weight is not None and weight.dim() == x.dim() > 2:
        kernel = weight.shape[2:].numel()
        channels = (x if not op.name.startswith("conv_transpose") else y).shape[1]
        groups = channels // max(1, weight.shape[1])
        positions = x.shape[2:].numel()
    elif x.dim() > 1:
        positions = x.numel() // max(1, x.shape[0] * x.shape[-1])
    return kernel / (4 * max(1, groups)) * group_size / max(1, positions)
