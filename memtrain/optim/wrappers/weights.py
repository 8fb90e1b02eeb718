"""Weights in 2 bytes, with corrections of 0, 1 or 2 bytes, around any optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.compressors.base import Key
from memtrain.kernels.step.split import MasterWeight, merge, split
from memtrain.optim.fused.fused import FusedStates
from memtrain.optim.states.checkpoint_options import CORRECTION
from memtrain.optim.states.compressed_states import closure_loss, refuse_capture
from memtrain.optim.states.known_optimizers import is_separable
from memtrain.optim.states.optimizer_hooks import notify_schedulers
from memtrain.optim.states.per_parameter import stands_for
from memtrain.optim.states.shards import check_unsharded, local, part_number, sharded_like
from memtrain.optim.states.stalled_weights import StalledWeights
from memtrain.optim.states.targets import Target, parts_of, refuse_sparse
from memtrain.optim.wrappers.wrapper import OptimizerWrapper, allowed, step_targets


class WeightFormat(NamedTuple):
    """How a weight is stored."""

    dtype: torch.dtype
    correction: torch.dtype | None = None
    stochastic: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize + (self.correction.itemsize if self.correction else 0)


FORMATS = {
    "bf16": WeightFormat(torch.bfloat16),
    "bf16+sr": WeightFormat(torch.bfloat16, stochastic=True),
    "bf16+8": WeightFormat(torch.bfloat16, torch.int8),
    "bf16+16": WeightFormat(torch.bfloat16, torch.int16),
    "fp16": WeightFormat(torch.float16),
    "fp16+8": WeightFormat(torch.float16, torch.int8),
    "fp16+16": WeightFormat(torch.float16, torch.int16),
}
"""Name in a config -> how a weight is kept: `+8` and `+16` bits of correction, or `+sr`."""


def parse(weights: str) -> WeightFormat:
    """Return the format with this name in a config."""
    if weights not in FORMATS:
        raise ValueError(f"weights={weights!r} is unknown; allowed: {', '.join(FORMATS)}")
    return FORMATS[weights]


def keeps_float32(model: nn.Module) -> dict[Tensor, str]:
    """Return the parameters that must stay float32, with the reason: those of batch norms.

    torch computes them in float32 with their running statistics.
    """
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    why = "kept: a norm with running statistics is float32"
    return {param: why for module in norms for param in module.parameters(recurse=False)}


class SplitWeights(OptimizerWrapper):
    """Steps an optimizer on float32 masters that exist only during their parameter's step.

    A parameter is bfloat16 or float16 in the forward and backward. In its step, the float32 master
    is merged from the parameter and its correction, the inner optimizer steps the master with the
    gradient in float32, and the master is split again. The kernels of fused optimizers do this
    block by block; other optimizers step whole masters. `bf16+16` trains as float32 masters,
    `bf16+8` as 24-bit masters, `bf16+sr` with unbiased rounding, and `bf16` as plain bfloat16
    parameters with float32 optimizer states.

    If something else writes a weight in place (`model.load_state_dict`, an average, DDP's first
    broadcast), the weight keeps the new value, and its correction becomes zero. Corrections that
    `load_state_dict` of this optimizer loads stay until the next step.

    Args:
        inner: A torch optimizer, or one with compressed states; its groups are shared. Its float32
            parameters are converted in place. Those of the format's dtype get corrections of zero;
            others, and those in `keep`, do not change.
        weights: `bf16`, `bf16+sr`, `bf16+8`, `bf16+16`, `fp16`, `fp16+8` or `fp16+16`.
        seed: Feeds stochastic rounding.
        keep: Parameters that are not converted.
        frozen: Parameters without an optimizer; converted without a correction.

    Raises:
        ValueError: If `weights` is unknown, or a float32 parameter is a DTensor.

    Memory:
        2 bytes per parameter, and 0, 1 or 2 of correction. Without fused kernels, `step()` has
        the master and the gradient of one parameter in float32, or of all parameters if the inner
        optimizer is not known to be separable.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SplitWeights(torch.optim.SGD([weight], lr=2.0**-12), "bf16+8")
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight.dtype, weight[0].item(), optimizer.master(weight)[0].item()
        (torch.bfloat16, 1.0, 0.999755859375)
    """

    def __init__(
        self,
        inner: Optimizer,
        weights: str = "bf16+8",
        *,
        seed: int = 0,
        keep: Iterable[Tensor] = (),
        frozen: Iterable[Tensor] = (),
    ) -> None:
        self.weights, self.format, self.seed = weights, parse(weights), seed
        self.corrections: dict[Tensor, Tensor | None] = {}
        self._before: dict[Tensor, torch.dtype] = {}  # what each converted parameter was
        self._versions: dict[Tensor, int | None] = {}  # None: whatever comes is right
        self._steps, self._stall = 0, StalledWeights()
        self._keep, frozen = set(keep), list(frozen)
        params = [p for group in inner.param_groups for p in group["params"]]
        check_unsharded(params + frozen)
        super().__init__(inner)
        self._convert(params)
        for param in frozen:
            if param not in self._keep and param.dtype == torch.float32:
                self._before[param] = param.dtype
                set_dtype(param, param.detach().to(self.format.dtype))

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the inner optimizer, one parameter at a time; return the closure's loss.

        Raises:
            RuntimeError: For sparse gradients, or parameters that were replaced. Nothing has
                changed.
            TypeError: For a weight whose dtype has changed. Nothing has changed.
        """
        refuse_capture()
        self.refuse_replaced(self.corrections)
        loss = closure_loss(closure)
        parts = parts_of(self.param_groups)
        targets = [target for _, group_targets in parts for target in group_targets]
        refuse_sparse(targets, type(self).__name__)
        self._refuse_converted(targets)
        if isinstance(self.inner, FusedStates):
            self.step_targets(targets)
        else:
            stalls = self.format.correction is None and not self.format.stochastic
            watched = self._stall.before(parts) if stalls else None
            # An optimizer that couples its parameters sees those without gradients too.
            every = [Target(p, p.grad) for p in self.params()]
            for some in [[t] for t in targets] if is_separable(self) else [every]:
                self.step_targets(some)
            self._stall.after(watched)
        self.advance()
        notify_schedulers(self)
        return loss

    def step_targets(self, targets: Sequence[Target]) -> None:
        """Step some parameters now."""
        self._refuse_converted(targets)
        if isinstance(self.inner, FusedStates):
            self.inner.step_targets([*map(self._with_master, targets)])
            for param, *_ in targets:  # the step's own change
                if param in self.corrections:
                    self._versions[param] = param._version
            return
        ready = allowed(targets)
        masters = {
            t.param: self._leaf(t.param)
            for t in ready
            if t.grad is not None and t.param in self.corrections
        }
        step_targets(self.inner, ready, masters)
        for param, leaf in masters.items():
            self._write(param, leaf.detach())

    def advance(self) -> None:
        """Record the end of a step: the next step draws other random bits."""
        self._steps += 1
        super().advance()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the inner optimizer's checks; its parameters are converted."""
        super().add_param_group(param_group)
        self._convert(self.param_groups[-1]["params"])

    def master(self, param: Tensor) -> Tensor:
        """Return the float32 value of a parameter: a new tensor, sharded as the parameter is."""
        if param not in self.corrections or param.dtype != self.format.dtype:
            return param.detach().float()
        self._drop_stale(param)
        return sharded_like(merge(local(param.detach()), self.corrections[param]), param)

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set the float32 value of a parameter: its 16-bit weight and its correction."""
        if param in self.corrections:
            self._write(param, value.detach().to(param.device, torch.float32))
        else:
            param.copy_(value)

    @torch.no_grad()
    def restore(self) -> Optimizer:
        """Convert parameters back to float32, and return the inner optimizer."""
        for param, dtype in self._before.items():
            set_dtype(param, self.master(param).to(dtype))
        self.corrections.clear()
        self._before.clear()
        return self.release_inner()

    def wrapper_state(self) -> dict[str, Any]:
        """Return the format, and the step counter that feeds stochastic rounding."""
        return {"weights": {"format": self.weights, "steps": self._steps}}

    def wrapper_tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the corrections, sharded as their parameters are."""
        for param in self.corrections:
            self._drop_stale(param)
        kept = ((p, t) for p, t in self.corrections.items() if t is not None)
        return {param: {CORRECTION: sharded_like(t, param)} for param, t in kept}

    def check_wrapper_state(
        self, values: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Raise ValueError if corrections are of another format or shape, or missing."""
        saved = values.get("weights")
        if saved is None:
            return
        if saved["format"] != self.weights:
            raise ValueError(f"the state has weights={saved['format']!r}, not {self.weights!r}")
        for param, correction in self.corrections.items():
            loaded = states.get(param, {}).get(CORRECTION)
            if correction is None or (loaded is not None and loaded.shape == param.shape):
                continue
            what = "no correction" if loaded is None else f"a correction {tuple(loaded.shape)}"
            raise ValueError(
                f"the state has weights={self.weights!r} and {what} of a weight of shape "
                f"{tuple(param.shape)}: a checkpoint of optimizer.state_dict(), or of "
                "get_optimizer_state_dict without flatten_optimizer_state_dict, has it as its "
                f"state {CORRECTION!r}"
            )

    def load_wrapper_state(
        self, values: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Restore the corrections; without corrections, set them to zero."""
        self._steps = int(values.get("weights", {"steps": 0})["steps"])
        for param in self.corrections:
            correction = self._follow(param)
            if correction is not None:
                loaded = states.get(param, {}).get(CORRECTION)
                correction.zero_() if loaded is None else correction.copy_(local(loaded))
            self._versions[param] = None

    def __getstate__(self) -> dict[str, Any]:
        for param in self.corrections:
            self._drop_stale(param)
        return {**super().__getstate__(), "_versions": dict.fromkeys(self.corrections)}

    def _drop_stale(self, param: Tensor) -> None:
        """Zero the correction of a weight that was modified since its last step."""
        correction = self._follow(param)
        if correction is not None and self._versions.get(param) not in (None, param._version):
            correction.zero_()
            self._versions[param] = param._version

    def _follow(self, param: Tensor) -> Tensor | None:
        """Return the correction on its weight's device: the model may be moved after `wrap`."""
        correction = self.corrections[param]
        if correction is not None and correction.device != param.device:
            correction = self.corrections[param] = correction.to(param.device)
        return correction

    def _convert(self, params: Iterable[Tensor]) -> None:
        for param in params:
            kept = stands_for(param) in self._keep
            if kept or param.dtype not in (torch.float32, self.format.dtype):
                continue
            whole = local(param.detach())
            low = torch.empty_like(whole, dtype=self.format.dtype)
            kind = self.format.correction
            self.corrections[param] = torch.empty_like(low, dtype=kind) if kind else None
            if param.dtype == torch.float32:
                self._before[param] = param.dtype
                set_dtype(param, low)
            self._write(param, whole.float())

    def _refuse_converted(self, targets: Iterable[Target]) -> None:
        """Raise TypeError for weights whose dtype changed, as by `model.float()`."""
        for param, *_ in targets:
            if param in self.corrections and param.dtype != self.format.dtype:
                raise TypeError(
                    f"a weight of shape {tuple(param.shape)} is now {param.dtype}, but "
                    f"weights={self.weights!r} needs {self.format.dtype}: model.to(dtype), "
                    "float() and half() are for a model before wrap or after unwrap"
                )

    def _with_master(self, target: Target) -> Target:
        """Return a target whose master a fused kernel reads and writes."""
        param = target.param
        if param not in self.corrections:
            return target
        self._drop_stale(param)
        if self.format.stochastic:
            return target._replace(master=MasterWeight(None, True, self._key(param).bits()))
        return target._replace(master=MasterWeight(self.corrections[param]))

    def _leaf(self, param: Tensor) -> nn.Parameter:
        """Return the float32 master that another optimizer steps in a parameter's place."""
        leaf = nn.Parameter(self.master(param))
        leaf._stands_for = stands_for(param)  # pyright: ignore[reportAttributeAccessIssue]
        return leaf

    def _write(self, param: Tensor, value: Tensor) -> None:
        stochastic = self.format.stochastic
        seed = self._key(param).bits() if stochastic else 0
        part = local(param.detach())
        split(local(value), part, self._follow(param), seed=seed, stochastic=stochastic)
        torch.autograd.graph.increment_version(param)  # kernels write past autograd
        self._versions[param] = param._version

    def _key(self, param: Tensor) -> Key:
        rank = part_number(param)
        return Key(self.seed, site=self.number(param), step=self._steps, rank=rank)


def set_dtype(param: Tensor, value: Tensor) -> None:
    """Replace a parameter's value by one of another dtype, and convert its gradient."""
    grad, param.grad = param.grad, None
    param.data = value
    if grad is not None:
        param.grad = grad.to(value.dtype)
