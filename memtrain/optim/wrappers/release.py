"""Gradient release: each weight is updated inside backward, as its gradient arrives."""

import math
from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.optim.states.compressed_states import closure_loss, refuse_capture
from memtrain.optim.states.optimizer_hooks import notify_schedulers
from memtrain.optim.states.shards import wait_for_part
from memtrain.optim.states.targets import Target, refuse_sparse
from memtrain.optim.wrappers import gradient_norms
from memtrain.optim.wrappers.accumulate import GradientSums
from memtrain.optim.wrappers.backward import Backward, hook_gradients
from memtrain.optim.wrappers.late_changes import LateChanges
from memtrain.optim.wrappers.release_checks import (
    broken_off,
    check_complex,
    check_options,
    check_separable,
    check_separate,
    refuse_scaler,
    second_gradient,
    warn_of_late_rates,
    warn_of_skipped,
)
from memtrain.optim.wrappers.wrapper import OptimizerWrapper

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class ReleaseGradients(OptimizerWrapper):
    """Updates each parameter inside backward and frees its gradient at once.

    `loss.backward()` updates the weights, and `optimizer.step()` ends the step: hooks and LR
    schedulers run, and changed options apply to the next backward. `zero_grad` discards incomplete
    sums and the gradients that `global_norm` keeps. A tied parameter is updated once, after all its
    uses. A gradient that was assigned by hand is applied by `step()`.

    Clipping:

    - `value` clamps every element to +-limit.
    - `parameter` scales each gradient whose own norm exceeds the limit.
    - `previous` scales all gradients by the global norm of the *last* step (each by its own norm in
      the first step, and after a norm of 0). A step of incomplete sums, as at the end of an epoch,
      is scaled by its own global norm; the next step uses the norm before it.
    - `two_pass` is exact: `step(closure)` runs the closure's backward twice, for the global norm
      and to update, with the same random state.
    - `global_norm` is exact: gradients are kept until `step()`. This saves memory only with states
      in host memory.

    With `clip="none"` the gradient of a smallest parameter is kept until `step()`, which raises if
    it has changed: `clip_grad_norm_` would come too late.

    A gradient with NaN or Inf skips its parameter's update; `two_pass` and `global_norm` skip the
    whole step. `skipped` counts them, and the first one warns. A norm above float32's range counts
    as Inf.

    A second backward before `step()` (accumulation, reentrant checkpointing of a tied weight) is
    refused. With `accumulate=n` the gradients of n backward passes are summed in one byte per
    element, and the n-th pass applies the sum; `step()` applies an incomplete sum. A checkpoint
    contains no sums.

    DDP is refused: its buckets keep all gradients. With FSDP2, updates follow the reduce-scatter;
    norms are of the whole parameter, one small all-reduce each.

    Args:
        inner: A torch optimizer, one with compressed states, or `SplitWeights`.
        clip: `none`, `value`, `parameter`, `previous`, `two_pass` or `global_norm`.
        limit: Of the clipping; above 0.
        loss_scale: The factor of the loss; gradients are divided by it.
        skip_nonfinite: Whether to check for NaN and Inf. On CUDA the host reads all norms at once
            when the step ends. For optimizers without fused kernels the host waits for each.
        accumulate: Backward passes per step.
        seed: Feeds the stochastic rounding of sums.

    Raises:
        ValueError: If a value is not allowed.

    Memory:
        The largest single gradient and a smallest one; with `accumulate` above 1, 1.016 bytes per
        parameter; with `global_norm` all gradients, and sums in float32.

    Example:
        >>> weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ReleaseGradients(torch.optim.SGD([weight, bias], lr=0.5))
        >>> (weight.sum() + bias).backward()
        >>> weight.tolist(), weight.grad
        ([0.5, 0.5], None)

    Reference:
        Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources
        (LOMO), arXiv:2306.09782: updates fused into backward, the norm by a pass of its own.
    """

    # GradScaler then leaves gradients alone and hands over what it found: see `refuse_scaler`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        *,
        clip: str = "none",
        limit: float = 1.0,
        loss_scale: float = 1.0,
        skip_nonfinite: bool = True,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        check_options(clip, limit, loss_scale, accumulate)
        self.clip, self.limit, self.loss_scale = clip, limit, loss_scale
        self.skip_nonfinite, self.accumulate = skip_nonfinite, accumulate
        self._sums = GradientSums(accumulate, seed)
        self.norm: float | None = None
        """Global norm of the last whole step's gradients, before clipping; None if not measured."""
        self.skipped = 0
        """Updates skipped so far for NaN or Inf."""
        self._done: set[Tensor] = set()
        self._rates: list[float] = []  # those of this step's first update
        self._squares = 0.0
        self._rest_norm = 0.0  # of previous: the norm of a step of incomplete sums
        # Parameter, norm on its device, and step counter before the update.
        self._pending: list[tuple[Tensor, Tensor, Tensor | float | None]] = []
        self._pass = ""  # of two_pass: "measure" or "update"
        self._factor = 1.0  # of two_pass and global_norm
        self._waiting: list[tuple[Tensor, Tensor]] = []  # of global_norm: gradients, unclipped
        self.late_changes = LateChanges(accumulate if clip == "none" else 0)
        """Detects gradients that are changed after they were applied."""
        self.backward = Backward()
        """The backward in which gradients arrive."""
        self.before: Callable[[], bool] | None = None
        """Called before updates, until it returns True."""
        self.after: Callable[[Tensor], None] | None = None
        """Called with each parameter that has been updated."""
        self._handles: dict[Tensor, Any] = {}
        self.lock = RLock()
        """Held while a gradient is applied."""
        params = [p for group in inner.param_groups for p in group["params"]]
        check_complex(params, clip, accumulate)
        check_separate(params)
        check_separable(inner)
        super().__init__(inner)
        self._attach()

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """End the step that backward has made; return the closure's loss.

        `two_pass` calls the closure twice. If `step` raises, gradients that were not applied are
        lost.

        Raises:
            RuntimeError: If a GradScaler calls it, `two_pass` gets no closure, gradients were
                changed after backward had applied them, or parameters were replaced.
        """
        refuse_capture()
        refuse_scaler(self)
        self.refuse_replaced(self._handles)
        run = self._two_passes if self.clip == "two_pass" else closure_loss
        try:
            loss = run(closure)
            self.late_changes.refuse()
            if self._done and self.clip != "global_norm":
                warn_of_late_rates(self._rates, self._learning_rates())
            self._update_rest()
        except BaseException:
            self.forget_step()
            raise
        self.late_changes.forget()
        self.backward.forget()
        if self._done and self._measures:
            self.norm = self.norm if self._rest_norm else math.sqrt(self._squares)
        self._done.clear()
        self._squares = self._rest_norm = 0.0
        self._attach()
        self._sums.steps += 1
        self.advance()
        notify_schedulers(self)
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients that have not been applied.

        These are incomplete sums, and the gradients that `global_norm` keeps. After a backward that
        raised (out of memory), the step that it began is over.
        """
        with self.lock:
            if self.backward.broke_off:
                self.forget_step()
                self._sums.steps += 1
                self.advance()
            if self.clip == "global_norm":
                self.forget_step()
            self._sums.drop()
            self.late_changes.restart()
            super().zero_grad(set_to_none)

    def forget_step(self) -> None:
        """Discard the present step: the next gradient begins a new one."""
        self.late_changes.forget()
        self._sums.drop()
        self._done.clear()
        self.backward.forget()
        self._squares, self._rest_norm, self._pending, self._waiting = 0.0, 0.0, [], []

    def detach(self) -> Optimizer:
        """Remove the hooks, and return the inner optimizer, which may step again."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        return self.release_inner()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the inner optimizer's checks; its gradients are released too."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        check_complex(params, self.clip, self.accumulate)
        super().add_param_group({**param_group, "params": params})
        self._attach()

    def wrapper_state(self) -> dict[str, Any]:
        """Return the last norm, which `previous` clips by, and the count of skipped updates."""
        values = {"norm": self.norm, "skipped": self.skipped, "steps": self._sums.steps}
        return {"gradients": values}

    def load_wrapper_state(
        self, values: Mapping[str, Any], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Restore the values of `wrapper_state`, or the initial values."""
        saved = values.get("gradients", {"norm": None, "skipped": 0})
        self.norm, self.skipped = saved["norm"], int(saved["skipped"])
        self._sums = GradientSums(self.accumulate, self._sums.seed)
        self._sums.steps = int(saved.get("steps", 0))
        self.forget_step()

    def __getstate__(self) -> dict[str, Any]:
        runtime = {"_handles": {}, "_pending": [], "_waiting": [], "before": None, "after": None}
        runtime |= {"lock": None, "backward": None, "late_changes": None}
        return {**super().__getstate__(), **runtime}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock, self.backward = RLock(), Backward()
        self.late_changes = LateChanges(self.accumulate if self.clip == "none" else 0)
        self._attach()

    @property
    def _measures(self) -> bool:
        norms = ("parameter", "previous", "two_pass", "global_norm")
        return self.skip_nonfinite or self.clip in norms

    def _attach(self) -> None:
        hook_gradients(self, self.params(), self._handles)
        self.late_changes.fewest = min(map(Tensor.numel, self._handles), default=0)

    def on_gradient(self, param: Tensor) -> None:
        """Apply a complete gradient in the backward, unless a sum must wait."""
        grad = param.grad
        if grad is None:
            return
        self.enter()
        self.refuse_replaced(self._handles)
        stays = False
        try:
            wait_for_part(grad)
            self.take(param, grad)
            stays = self.late_changes.keeps(param, grad)
        finally:
            if not stays:
                param.grad = None

    def take(self, param: Tensor, grad: Tensor) -> None:
        """Apply a gradient, or add it to the sum of its parameter's gradients."""
        if self.accumulate > 1:
            self._check(param, grad)
            total = self._sums.add(param, self.number(param), grad)
            if total is None:
                return
            grad = total
        self._update(param, grad)

    def enter(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Record the backward of a gradient; `at_end` is called when it ends or is refused."""
        refuse_capture()
        if self.backward.entered(at_end):
            at_end()
            if self._done or self._sums.waiting:
                raise broken_off(len(self._done), len(self._handles))

    def _update(self, param: Tensor, grad: Tensor) -> None:
        """Clip and apply one gradient."""
        self._check(param, grad)
        if self.before is not None and self.before():
            self.before = None
        if not self._done:
            self._rates = self._learning_rates()
        self._done.add(param)
        norm = gradient_norms.norm_of(grad) if self._measures else 0.0
        if isinstance(norm, Tensor):
            self._pending.append((param, norm, gradient_norms.count_of(self.state, param)))
        elif not self._add_norm(param, norm := norm / self.loss_scale):
            return
        if self.clip == "global_norm":
            self._waiting.append((param, grad))
        elif self._pass != "measure":
            self._apply(param, grad, norm)

    def _learning_rates(self) -> list[float]:
        return [g["lr"] for g in self.param_groups if isinstance(g.get("lr"), float)]

    def _update_rest(self) -> None:
        """Apply incomplete sums, gradients that were set by hand, and kept gradients."""
        if self.clip == "previous" and not self._done:
            norms = (float(gradient_norms.norm_of(total)) for total in self._sums.each())
            self._rest_norm = math.hypot(*filter(math.isfinite, norms)) / self.loss_scale
        for param, total in self._sums.rest():
            self._update(param, total)
        for param in self.params():
            if param.grad is not None and param not in self._done:
                self._update(param, param.grad)
            param.grad = None
        self._read_norms()
        waiting, self._waiting = self._waiting, []
        if waiting and self._set_factor():
            while waiting:
                self._apply(*waiting.pop(0), 0.0)

    def _set_factor(self) -> bool:
        """Set the factor that clips by the global norm; skip the step if it is not finite."""
        norm = math.sqrt(self._squares)
        if math.isfinite(norm):
            self._factor = min(1.0, self.limit / (norm + _TINY))
            return True
        self._skip("a step")
        self._done.clear()
        return False

    def _apply(self, param: Tensor, grad: Tensor, norm: float | Tensor) -> None:
        guard = norm if isinstance(norm, Tensor) else None
        factor = self._clip_factor(norm if guard is None else guard.double() / self.loss_scale)
        factor = factor / self.loss_scale
        if isinstance(factor, Tensor) or factor != 1.0:
            widened = isinstance(self.inner, OptimizerWrapper) and not param.is_complex()
            grad = (grad.float() if widened else grad) * factor
        if self.clip == "value":
            grad = grad.clamp(-self.limit, self.limit)
        self.step_targets([Target(param, grad, guard)])
        if self.after is not None:
            self.after(param)

    def _read_norms(self) -> None:
        """Read the pending norms, with one wait per device; count the skipped updates."""
        pending, self._pending = self._pending, []
        values = gradient_norms.read([norm for _, norm, _ in pending])
        for (param, _, count), value in zip(pending, values, strict=True):
            if not self._add_norm(param, value / self.loss_scale):
                gradient_norms.set_count(self.state, param, count)

    def _add_norm(self, param: Tensor, norm: float) -> bool:
        """Add a gradient's norm to the global norm; skip its update if it is not finite."""
        whole = self._pass == "measure" or self.clip == "global_norm"  # skips all or nothing
        if math.isfinite(norm) or whole:
            self._squares += norm * norm
            return True
        self._skip(f"the update of a parameter of shape {tuple(param.shape)}")
        return False

    def _skip(self, what: str) -> None:
        self.skipped += 1
        if self.skipped == 1:
            warn_of_skipped(what)

    def _check(self, param: Tensor, grad: Tensor) -> None:
        refuse_sparse([(param, grad)], type(self).__name__)
        if self.clip == "two_pass" and not self._pass:
            raise RuntimeError(
                "clip='two_pass' runs backward itself, twice: call optimizer.step(closure) with a "
                "closure that computes the loss and calls backward()"
            )
        if param in self._done:
            self.backward.refused()
            raise second_gradient(param)

    def _clip_factor(self, norm: float | Tensor) -> float | Tensor:
        if self.clip in ("two_pass", "global_norm"):
            return self._factor
        if self.clip not in ("parameter", "previous"):
            return 1.0
        if self.clip == "previous":  # no norm before the first step: each by its own
            norm = self._rest_norm or self.norm or norm
        factor = self.limit / (norm + _TINY)
        return factor.clamp(max=1.0) if isinstance(factor, Tensor) else min(1.0, factor)

    def _two_passes(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            raise RuntimeError("clip='two_pass' needs optimizer.step(closure): it runs it twice")
        random = random_state()
        try:
            self._pass = "measure"
            loss = closure_loss(closure)
            self._read_norms()
            if not self._set_factor():
                return loss
            self._done.clear()
            self._squares = 0.0
            set_random_state(random)
            self._pass = "update"
            return closure_loss(closure)
        finally:
            self._pass = ""
