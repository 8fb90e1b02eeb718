"""Optimizer states in host memory: gradients go there, weights are stepped and come back."""

from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from memtrain.kernels.dispatch import host_work
from memtrain.optim.states import optimizer_hooks
from memtrain.optim.states.compressed_states import (
    CompressedStates,
    closure_loss,
    refuse_capture,
)
from memtrain.optim.states.first_step import raw_step
from memtrain.optim.states.targets import Target, refuse_sparse
from memtrain.optim.wrappers.backward import hook_gradients, one_at_a_time
from memtrain.optim.wrappers.host_copies import HostCopies, HostWorker, copies_of
from memtrain.optim.wrappers.host_parameters import HostParameters, Sent, check_whole
from memtrain.optim.wrappers.release import ReleaseGradients, refuse_scaler
from memtrain.optim.wrappers.weights import SplitWeights, set_dtype
from memtrain.optim.wrappers.wrapper import OptimizerWrapper

Build = Callable[[CompressedStates, Mapping[Tensor, Tensor]], Optimizer]


class HostStates(OptimizerWrapper):
    """Steps an optimizer in host memory, on copies of the parameters that lie there.

    The optimizer inside, with split weights and released gradients around it, is what it would be
    on the device, but its parameters are copies in host memory, and so are its states, corrections
    and sums of gradients: what is computed is what the same kernels compute in place, bit for bit,
    and so is a checkpoint. The parameters, groups and gradients that a user sees are the device's.

    With released gradients each goes over as backward brings it, is stepped by the C++ kernels in a
    thread beside the backward, and its weight is sent back at once. The end of the backward waits
    for the rest, so that whatever reads a weight after `loss.backward()` reads the stepped one, as
    in place. Gradients that are kept go over in `step()`, all at once. With weights of two bytes
    the bus has 2 bytes a parameter down in each backward, and 2 up in each step.

    A weight that something else writes in place (`model.load_state_dict`) is fetched again before
    its next step.

    Args:
        compressed: On the device, at any step of a run; its states move to the host.
        build: Puts the other wrappers around it, given it and parameter -> its copy on the host.
        copies: How a parameter's values travel.

    Raises:
        ValueError: If a parameter is sharded (a DTensor).

    Memory:
        On the device none but weights and gradients in flight. On the host a copy of the weights,
        their corrections, the states, sums of gradients and at most `IN_FLIGHT` gradients; all
        gradients where they are kept or clipped by their global norm. On CUDA weights and gradients
        there are pinned, which rounds each up to a power of two.

    Example:
        >>> from memtrain.optim import AdamW4bit
        >>> weight = torch.nn.Parameter(torch.ones(128, 64))
        >>> optimizer = HostStates(AdamW4bit([weight], lr=0.1, weight_decay=0.0))
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight[0, 0].item()
        0.8999999761581421

    Reference:
        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840.
    """

    def __init__(
        self,
        compressed: CompressedStates,
        build: Build = lambda compressed, leaves: compressed,
        *,
        copies: Callable[[Tensor], HostCopies] = copies_of,
    ) -> None:
        params = [p for group in compressed.param_groups for p in group["params"]]
        check_whole(params)
        self.before: Callable[[], bool] | None = None
        """Called before updates, until it returns True."""
        self._compressed = compressed
        self._groups: list[dict[str, Any]] = compressed.param_groups
        self.host = HostParameters(copies)
        """The parameters' copies in host memory."""
        self._leaves = self.host.leaves
        self._start()
        self.host.add(params)
        compressed.param_groups = [self.host.group(group) for group in self._groups]
        states = [(p, compressed.state.pop(p)) for p in params if p in compressed.state]
        compressed.state.update((self._leaves[p], _moved(own, "cpu")) for p, own in states)
        super().__init__(build(compressed, self._leaves))
        self.host.finish(params)
        self._attach()

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups, with the parameters of the device."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        if "_inner_step" in vars(self):  # not inside Optimizer.__init__
            self._groups = value

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its states, which are on the host; to be read."""
        self._worker.finish()
        states = self.inner.state
        return MappingProxyType(
            {p: states[leaf] for p, leaf in self._leaves.items() if leaf in states}
        )

    @state.setter
    def state(self, value: Any) -> None:
        """Is set by `Optimizer.__init__` alone."""

    @property
    def _release(self) -> ReleaseGradients | None:
        return releasing(self)

    @property
    def norm(self) -> float | None:
        """Global norm of the last step's released gradients, as `ReleaseGradients.norm`."""
        return None if self._release is None else self._release.norm

    @property
    def skipped(self) -> int:
        """Updates skipped so far for NaN or Inf, where gradients are released."""
        return 0 if self._release is None else self._release.skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self._release is not None

    @torch.no_grad()
    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step what has a gradient, or end the step that backward has made; wait for all of it.

        Where it raises the step is over too: gradients that were kept stay the parameters' own, and
        released ones are gone.

        Args:
            closure: Recomputes the loss; optional.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: Whatever the optimizer inside raises, in this step's backward too.
            TypeError: If a parameter has another dtype than at first; nothing was changed then.
        """
        refuse_capture()
        if self._release is not None:
            refuse_scaler(self)
        self.refuse_replaced(self._leaves)
        self._begin()
        arguments = [partial(self._closed, closure)] if closure is not None else []
        try:
            if closure is None:
                self._gather()
            with host_work():
                loss = raw_step(self.inner, *arguments)
        except BaseException:
            self._worker.finish(drop_errors=True)
            if self._release is not None:
                self._release.forget_step()
            raise
        finally:
            for leaf in self._leaves.values():
                if self._release is None and leaf.grad is not None:
                    self.host.send_back(leaf)
                leaf.grad = None
            self.host.join()
            self._begun = False
        if self._release is not None:
            for param in self._leaves:
                param.grad = None
        _copy_options(self.inner.param_groups, self._groups)
        self._attach()
        self.notify_schedulers()
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `ReleaseGradients.zero_grad`, of gradients on their way to the host too.

        Args:
            set_to_none: As in torch.

        Raises:
            RuntimeError: Whatever the optimizer inside raised in the backward before.
        """
        try:
            self._worker.finish()
        finally:
            self.host.join()
            super().zero_grad(set_to_none)
            release = self._release
            if release is not None:
                release.zero_grad()
                self._begun = self._begun and any(map(release.has_updated, self._leaves.values()))

    @torch.no_grad()
    @one_at_a_time
    def on_gradient(self, param: Tensor) -> None:
        """A backward's gradient is complete: send it to the host and let it be stepped there."""
        release, grad = self._release, param.grad
        if release is None or grad is None:
            return
        release.enter(self._wait)
        refuse_sparse([Target(param, grad)], type(self).__name__)
        if self.before is not None and self.before():
            self.before = None
        self._begin()
        stays = False
        try:
            send, step = partial(self.host.send, param, grad), partial(self._step_released, param)
            if self.host.copies(param).beside:
                self._worker.submit(send, step)
            else:
                step(send())
            stays = release.late_changes.keeps(param, grad)
        finally:
            if not stays:
                param.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the host's copies are made once."""
        if "_inner_step" in vars(self):  # not inside Optimizer.__init__
            raise RuntimeError(
                "add_param_group with optim.device='cpu': add the group before memtrain.wrap, or "
                "memtrain.unwrap first and wrap again"
            )

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As the optimizer inside would give it on the device: either loads the other's.

        Returns:
            Plain dicts of plain tensors, on the host.
        """
        self._worker.finish()
        self.host.fetch_written()
        _copy_options(self._groups, self.inner.param_groups)
        return optimizer_hooks.saved(self, self.inner, self.inner.state_dict)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or of the optimizer inside on a device.

        Args:
            state_dict: A checkpoint.

        Raises:
            ValueError: If anything in it does not fit; nothing was changed then.
        """
        self._worker.finish()
        original = self._compressed.original  # the plain optimizer, whose groups are a user's
        if original is not None:
            original.param_groups = self._compressed.param_groups
        try:
            optimizer_hooks.loaded(self, self.inner, state_dict, self.inner.load_state_dict)
        finally:
            if original is not None:
                original.param_groups = self._groups
        _copy_options(self.inner.param_groups, self._groups)
        self.host.fetch_all()  # whatever weights are loaded beside it, corrections hold

    def master(self, param: Tensor) -> Tensor:
        """The float32 value of a parameter: a new tensor, in host memory.

        Args:
            param: Of the model.

        Returns:
            float32, of the parameter's shape.
        """
        self._worker.finish()
        self.host.fetch_written()
        split, leaf = self._split(), self._leaves.get(param)
        return param.detach().float() if leaf is None or split is None else split.master(leaf)

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Give a parameter a float32 value; what its dtype loses of it goes into its correction.

        Args:
            param: Of the model.
            value: Of its shape.
        """
        self._worker.finish()
        split, leaf = self._split(), self._leaves.get(param)
        if split is None or leaf is None:
            param.copy_(value)
            return
        split.set_master(leaf, value.to("cpu"))
        param.copy_(leaf)
        self.host.matches(param)

    def release_inner(self) -> Optimizer:
        """Take the hooks off; the optimizer inside may step again, on the host's copies."""
        self._worker.finish()
        self.host.fetch_written()
        _copy_options(self._groups, self.inner.param_groups)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        return super().release_inner()

    @torch.no_grad()
    def move_back(self) -> CompressedStates:
        """Move weights and states to the device, once the wrappers inside have been taken off.

        Returns:
            The optimizer that was given, with the device's parameters.
        """
        compressed = self._compressed
        for param, leaf in self._leaves.items():
            if param.dtype != leaf.dtype:
                set_dtype(param, leaf.detach().to(param.device))
            if leaf in compressed.state:
                compressed.state[param] = _moved(compressed.state.pop(leaf), param.device)
        compressed.param_groups = self._groups
        return compressed

    def __getstate__(self) -> dict[str, Any]:
        self._worker.finish()
        self.host.fetch_written()
        return {k: v for k, v in super().__getstate__().items() if k not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.before = None
        self._start()
        super().__setstate__({})
        self._attach()

    def _start(self) -> None:
        """Make what does not outlive a process."""
        self._handles: dict[Tensor, Any] = {}
        self._lock = RLock()  # autograd brings gradients in one thread for each device
        self._worker = HostWorker()
        self._begun = False

    def _attach(self) -> None:
        """Add missing hooks, and a callback that sends weights back, if gradients are released."""
        if self._release is None:
            return
        self._release.after = self.host.send_back
        for param, leaf in self._leaves.items():
            leaf.requires_grad_(param.requires_grad)
        hook_gradients(self, self._leaves, self._handles)

    def _begin(self) -> None:
        """The options of groups, as they are when a step begins."""
        if self._begun:
            return
        self.host.check_dtypes()
        _copy_options(self._groups, self.inner.param_groups)
        self._begun = True

    def _wait(self) -> None:
        """A backward ends: what follows reads stepped weights. Errors wait for `step`."""
        self._worker.wait()
        self.host.join()

    @torch.no_grad()
    def _step_released(self, param: Tensor, sent: Sent) -> None:
        """Step the copy of a parameter with a released gradient, on the host."""
        leaf = self._leaves[param]
        with host_work():
            self.host.receive(param, sent)
            try:
                if self._release is not None:
                    self._release.take(leaf, sent.grad)
            finally:
                leaf.grad = None

    def _closed(self, closure: Callable[[], Any]) -> Any:
        with host_work(on_host=False):
            loss = closure_loss(closure)
        with torch.no_grad():
            self._gather()
        return loss

    def _gather(self) -> None:
        """Bring the gradients that no hook has sent to the host; wait for those under way."""
        self._worker.finish()
        release = self._release
        left = [p for p in self._leaves if p.grad is not None]
        if release is not None:
            release.late_changes.refuse()
            left = [p for p in left if not release.late_changes.is_kept(p)]
        refuse_sparse([Target(p, p.grad) for p in left], type(self).__name__)
        if release is not None and release.accumulate == 1:  # one at a time
            for param in left:
                if not release.has_updated(self._leaves[param]) and param.grad is not None:
                    self._step_released(param, self.host.send(param, param.grad))
                    param.grad = None
            return
        sent = [(p, self.host.send(p, p.grad)) for p in left if p.grad is not None]
        for param, one in sent:
            self.host.receive(param, one)

    def _split(self) -> SplitWeights | None:
        inner = self._release.inner if self._release is not None else self.inner
        return inner if isinstance(inner, SplitWeights) else None


_RUNTIME = ("before", "_handles", "_lock", "_worker", "_begun")


def releasing(optimizer: Optimizer) -> ReleaseGradients | None:
    """Find what releases an optimizer's gradients, here or on the host; None where they are kept.

    Args:
        optimizer: What `memtrain.wrap` returned.

    Returns:
        Its options, the last norm and what was skipped can be read.
    """
    inside = optimizer.inner if isinstance(optimizer, HostStates) else optimizer
    return inside if isinstance(inside, ReleaseGradients) else None


def _moved(states: Any, device: Any) -> Any:
    """A parameter's states on another device; counters of steps stay where they are."""
    return {
        name: value if name == "step" else tree_map_only(Tensor, lambda x: x.to(device), value)
        for name, value in states.items()
    }


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for options, group in zip(source, target, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
