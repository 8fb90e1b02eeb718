"""ActNN's sensitivities: from what a forward saves and the gradients that its backward computes."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from memtrain.activations.adaptive.bit_widths import BitWidths
from memtrain.activations.adaptive.noise_warning import (
    GradientVariance,
    expected_noise,
    noise_warning,
)
from memtrain.activations.saved.site import Site
from memtrain.compressors.samples import sensitivity


@dataclass
class _OutputGradient:
    """Squared norms of the gradient of one op's output."""

    factor: float  # (K / 4g) (G / P), see `ActnnSensitivity`
    has_bound: bool  # whether C bounds the variance of a weight's gradient
    norms: Tensor | None = None  # |dy|**2 of each sample, [samples]; or [1], of all together

    def observe(self, n_samples: int, grad: Tensor) -> None:
        """Add the gradient that a backward has computed."""
        dy = grad.detach()
        own = n_samples if dy.dim() and dy.shape[0] == n_samples else 1
        norms = dy.reshape(own, -1).float().square().sum(1) if dy.numel() else dy.new_zeros(own)
        self.norms = norms if self.norms is None else self.norms + norms


@dataclass
class _SavedTensor:
    """Ranges of one saved tensor, and the output gradients of the ops that read it in backward."""

    site: str
    ranges: Tensor  # R of each sample, [samples]
    size: float  # elements of a sample
    ops: list[_OutputGradient] = field(default_factory=list)


class ActnnSensitivity:
    """Measures sensitivities in every `interval`-th step, and allocates the bits again after it.

    The sensitivity of sample n of a saved tensor is `C_n = K / (4 g) * G / P * R_n * S`, with K the
    size of the convolution's kernel (1 for other ops), g its groups, G the elements of a
    quantisation group, P the positions that share a weight (pixels, tokens), R_n the sum over the
    sample's groups of (max - min)**2, and S the mean over samples of the squared norm of the
    gradient of the op's output. A tensor that several ops read has the sum over them. For a linear
    layer or a convolution, C_n / (2**b - 1)**2 bounds the variance that rounding to b bits adds to
    the weight's gradient; for other ops it is a heuristic.

    Args:
        bits: Allocated again after each measurement.
        interval: Forwards from one measurement to the next.
        per_sample: Whether S is each sample's own, remembered over the whole data set: a sample is
            known again by a hash of its slice of the model's first input, its squared norms are
            averaged half and half with the earlier ones, and an unseen sample counts as the mean of
            those seen. Every step is measured then, and the device waited for.
        parameters: Gives the model's, whose gradients' variance the quantisation noise is compared
            to.

    Warns:
        UserWarning: Some steps after an allocation, if the variance that it adds to the gradients
            of the weights of linear layers and convolutions is above 10% of the gradient's own from
            one batch to the next.

    Memory:
        In a measured step, 4 bytes per sample and saved tensor; with `per_sample`, one number per
        sample of the data set and site, in host memory.

    Reference:
        Chen et al., ActNN, ICML 2021, arXiv:2104.14129, section 4; its code's `use_gradient`.
    """

    def __init__(
        self,
        bits: BitWidths,
        interval: int,
        *,
        per_sample: bool = False,
        parameters: Callable[[], Iterable[nn.Parameter]] = tuple,
    ) -> None:
        self.bits, self.interval, self.per_sample = bits, interval, per_sample
        self.parameters, self.gradient_variance = parameters, GradientVariance()
        self.noise: dict[str, float] = {}
        """Gradient variance that the present bits are expected to add, by site."""
        self.sample_norms: dict[str, dict[int, float]] = {}
        """Site -> a sample's hash -> its S."""
        self._reset()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._reset()

    def _reset(self) -> None:
        self._measuring = self._due = False
        self._saved: list[_SavedTensor] = []
        self._by_payload: WeakKeyDictionary[Any, _SavedTensor] = WeakKeyDictionary()
        self._hashes: list[int] = []

    def begin(self, step: int, inputs: Iterable[Any]) -> bool:
        """Begin a forward; allocate the bits from the last step's measurement, if there is one.

        Args:
            step: Forwards so far.
            inputs: The model's inputs.

        Returns:
            Whether the bits have been allocated again.
        """
        solved = self.flush()
        if self.gradient_variance.running and self.gradient_variance.next():
            self._warn()
        if solved and self.noise and not self.gradient_variance.running:
            self.gradient_variance.begin(self.parameters())
        due = step % self.interval == 0
        if not self._saved or due:  # else a backward that is still to come is waited for
            self._reset()
            self._measuring, self._due = due or self.per_sample, due
        else:
            self._measuring = False
        if self.per_sample:
            self._weigh_samples(inputs)
        return solved

    def flush(self) -> bool:
        """Allocate the bits from what has been measured, if a backward has been seen."""
        seen = any(op.norms is not None for saved in self._saved for op in saved.ops)
        if not seen:
            return False
        if self.per_sample:
            self._update_sample_norms()
        if self._due:
            self.bits.solve(self._sensitivities())
            # rounding a uniform value adds 1/6 of a step squared on average, where C has 1/4
            self.noise = {
                site: 4 / 6 * expected_noise([c for c, _ in samples], self.bits.widths[site])
                for site, samples in self._sensitivities(bounds_only=True).items()
            }
        solved = self._due
        self._reset()
        return solved

    def saved(self, site: Site, x: Tensor, node: Any, payload: Any = None) -> None:
        """Note that an op saves `x`, as a payload that other saves may share.

        Args:
            site: Of the save.
            x: The saved tensor.
            node: Of the op; the gradient of its result is observed.
            payload: The same object where saves share it.
        """
        template = self.bits.templates.get(site.name)
        if not self._measuring or template is None or isinstance(x, FakeTensor):
            return
        known = None if payload is None else self._by_payload.get(payload)
        if known is None:
            with torch.no_grad():
                ranges = sensitivity(x, template.group_size)
            known = _SavedTensor(site.name, ranges, x.numel() / max(1, len(ranges)))
            self._saved.append(known)
            if payload is not None:
                self._by_payload[payload] = known
        elif known.site != site.name:
            self.bits.leaders[site.name] = known.site
        has_bound = site.op in ("linear", "addmm") or site.op.startswith("conv")
        output = _OutputGradient(_factor(site.op, x, node, template.group_size), has_bound)
        known.ops.append(output)
        node.register_prehook(partial(_observe, output, len(known.ranges)))

    def state_dict(self) -> dict[str, Any]:
        """Give plain dicts for `load_state_dict`."""
        return {site: dict(row) for site, row in self.sample_norms.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sample_norms = {site: dict(row) for site, row in state.items()}
        self._reset()

    def _warn(self) -> None:
        name, remedy = "variance from batch to batch", "more average_bits"
        if text := noise_warning(self.noise, self.gradient_variance.estimate(), name, remedy):
            warnings.warn(text, stacklevel=2)

    def _sensitivities(
        self, *, bounds_only: bool = False
    ) -> dict[str, Sequence[tuple[float, float]]]:
        """Give sensitivity and size of each sample by site; where C is a bound, or everywhere."""
        found: dict[str, list[tuple[float, float]]] = {}
        for saved in self._saved:
            template = self.bits.templates[saved.site]
            ops = [op for op in saved.ops if op.has_bound or not bounds_only]
            costs = _costs(saved, ops, per_sample=self.per_sample)
            if bounds_only:  # G counts the zeros that fill a sample's last group
                filled = saved.size / template.group_size
                costs = [c * filled / ceil(filled) for c in costs]
            if costs and template.per_sample:
                found.setdefault(saved.site, []).extend((c, saved.size) for c in costs)
            elif costs:  # one width for all calls
                before = found.get(saved.site, [(0.0, 0.0)])[0]
                found[saved.site] = [(before[0] + sum(costs), before[1] + saved.size * len(costs))]
        return dict(found)

    # -- squared norms of the data set's samples ----------------------------------------------

    def _weigh_samples(self, inputs: Iterable[Any]) -> None:
        """Hash the samples of the present batch, and weigh them by their squared norms."""
        first = next((x for x in inputs if isinstance(x, Tensor) and x.dim()), None)
        hashes = content_hashes(first) if first is not None else []
        if self._measuring:
            self._hashes = hashes
        self.bits.sample_weights = {}
        for site, row in self.sample_norms.items():
            mean = sum(row.values()) / len(row)
            self.bits.sample_weights[site] = tuple(row.get(h, mean) for h in hashes)

    def _update_sample_norms(self) -> None:
        for saved in self._saved:
            norms = [op.norms for op in saved.ops if op.norms is not None]
            own = [norm for norm in norms if len(norm) == len(self._hashes) == len(saved.ranges)]
            if not own:
                continue
            row = self.sample_norms.setdefault(saved.site, {})
            for sample, new in zip(self._hashes, sum(own[1:], own[0]).tolist(), strict=True):
                row[sample] = 0.5 * (row[sample] + new) if sample in row else new


def content_hashes(x: Tensor) -> list[int]:
    """Hash each sample by its elements alone, whatever its place in the batch.

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


def _costs(saved: _SavedTensor, ops: Sequence[_OutputGradient], *, per_sample: bool) -> list[float]:
    """Give C of each sample, summed over `ops`; none if no gradient came."""
    n_samples, factors = len(saved.ranges), []
    for op in ops:
        if op.norms is not None:
            own = per_sample and len(op.norms) == n_samples
            norms = op.norms if own else op.norms.sum() / max(1, n_samples)
            factors.append(op.factor * norms)
    return (saved.ranges * sum(factors[1:], factors[0])).tolist() if factors else []


def _observe(output: _OutputGradient, n_samples: int, grads: Sequence[Tensor | None]) -> None:
    """Observe the gradient of an op's first result."""
    if grads and grads[0] is not None:
        output.observe(n_samples, grads[0])


def _factor(op: str, x: Tensor, node: Any, group_size: int) -> float:
    """Give K / (4 g) * G / P."""
    kernel, groups, positions = 1, 1, 1
    weight = getattr(node, "_saved_weight", None) if op.startswith("conv") else None
    if weight is not None and weight.dim() == x.dim() > 2:
        kernel, groups = weight.shape[2:].numel(), node._saved_groups
        positions = x.shape[2:].numel()
    elif x.dim() > 1:
        positions = x.numel() // max(1, x.shape[0] * x.shape[-1])
    return kernel / (4 * max(1, groups)) * group_size / max(1, positions)
