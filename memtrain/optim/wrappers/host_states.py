"""Optimizer states in host memory: gradients go there, weights are stepped and come back."""

from collections.abc import Callable
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
from memtrain.optim.states.optimizer_hooks import notify_schedulers
from memtrain.optim.states.targets import refuse_sparse
from memtrain.optim.wrappers.backward import hook_gradients
from memtrain.optim.wrappers.host_copies import HostCopies, HostWorker, copies_of
from memtrain.optim.wrappers.host_parameters import HostParameters, Sent, check_whole
from memtrain.optim.wrappers.release import ReleaseGradients, refuse_scaler
from memtrain.optim.wrappers.weights import SplitWeights, set_dtype
from memtrain.optim.wrappers.wrapper import OptimizerWrapper

Build = Callable[[CompressedStates], Optimizer]


class HostStates(OptimizerWrapper):
    """Steps an optimizer in host memory, on copies of the parameters.

    The states, corrections and sums of gradients of the optimizer inside, and of the wrappers that
    `build` puts around it, are on the host. Steps and checkpoints equal those on the device bit for
    bit. A user sees the parameters, groups and gradients of the device.

    A released gradient is copied to the host in the backward and stepped by the C++ kernels in a
    thread; its weight is sent back at once. The end of the backward waits for the rest, so whatever
    reads a weight after `loss.backward()` reads the stepped one. Kept gradients are copied in
    `step()`. A weight that something else writes in place (`model.load_state_dict`) is fetched
    before its next step.

    On the host: a copy of the weights, their corrections, the states, sums of gradients and at most
    `IN_FLIGHT` gradients; all gradients if they are kept or clipped by their global norm. On CUDA
    weights and gradients are pinned, which rounds each up to a power of two.

    Reference:
        Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840.
    """

    def __init__(
        self,
        compressed: CompressedStates,
        build: Build = lambda compressed: compressed,
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
        compressed.state.update((self._leaves[p], _moved(state, "cpu")) for p, state in states)
        super().__init__(build(compressed))
        self.host.finish(params)
        self._attach()

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups, with the parameters of the device."""
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self._groups = value

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its states, which are on the host; read-only."""
        self._worker.finish()
        states = self.inner.state
        return MappingProxyType(
            {p: states[leaf] for p, leaf in self._leaves.items() if leaf in states}
        )

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
        """Step parameters with gradients, or end the step that the backward has made, and wait.

        Errors of the optimizer inside, in this step's backward too, end the step: kept gradients
        stay on the parameters, released ones are lost. A changed dtype raises before any change.
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
        notify_schedulers(self)
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `ReleaseGradients.zero_grad`; raise the errors of the backward's updates."""
        try:
            self._worker.finish()
        finally:
            self.host.join()
            super().zero_grad(set_to_none)
            if self._release is not None:
                self._release.zero_grad()
            self._begun = False

    def on_gradient(self, param: Tensor) -> None:
        """Send a complete gradient to the host, which steps its parameter."""
        release, grad = self._release, param.grad
        if release is None or grad is None:
            return
        release.enter(self._wait)
        refuse_sparse([(param, grad)], type(self).__name__)
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
        """Raise RuntimeError: the copies on the host are made once."""
        raise RuntimeError(
            "add_param_group with optim.device='cpu': add the group before memtrain.wrap, or "
            "memtrain.unwrap first and wrap again"
        )

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint that the optimizer inside would give on the device."""
        self._worker.finish()
        self.host.fetch_written()
        _copy_options(self._groups, self.inner.param_groups)
        return optimizer_hooks.saved(self, self.inner, self.inner.state_dict)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of `state_dict`, here or of the optimizer inside on a device."""
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
        """Return the float32 value of a parameter: a new tensor, in host memory."""
        self._worker.finish()
        self.host.fetch_written()
        split, leaf = self._split(), self._leaves.get(param)
        return param.detach().float() if leaf is None or split is None else split.master(leaf)

    @torch.no_grad()
    def set_master(self, param: Tensor, value: Tensor) -> None:
        """Set the float32 value of a parameter: its 16-bit weight and its correction."""
        self._worker.finish()
        split, leaf = self._split(), self._leaves.get(param)
        if split is None or leaf is None:
            param.copy_(value)
            return
        split.set_master(leaf, value.to("cpu"))
        param.copy_(leaf)
        self.host.matches(param)

    def release_inner(self) -> Optimizer:
        """Remove the hooks; the optimizer inside may step again, on the copies on the host."""
        self._worker.finish()
        self.host.fetch_written()
        _copy_options(self._groups, self.inner.param_groups)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        return super().release_inner()

    @torch.no_grad()
    def move_back(self) -> CompressedStates:
        """Move weights and states to the device, after the wrappers inside were removed."""
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
        """Create what copies and pickles lack."""
        self._handles: dict[Tensor, Any] = {}
        self.lock = RLock()
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
        """Copy the options of groups to the optimizer inside when a step begins."""
        if self._begun:
            return
        self.host.check_dtypes()
        _copy_options(self._groups, self.inner.param_groups)
        self._begun = True

    def _wait(self) -> None:
        """End a backward: later work reads stepped weights. `step` raises the errors."""
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
                    with self._release.lock:  # the thread and autograd bring gradients
                        self._release.take(leaf, sent[0])
            finally:
                leaf.grad = None

    def _closed(self, closure: Callable[[], Any]) -> Any:
        with host_work(on_host=False):
            loss = closure_loss(closure)
        with torch.no_grad():
            self._gather()
        return loss

    def _gather(self) -> None:
        """Copy the gradients that no hook has sent to the host; wait for the others."""
        self._worker.finish()
        release = self._release
        remaining = [p for p in self._leaves if p.grad is not None]
        if release is not None:
            release.late_changes.refuse()
            remaining = [p for p in remaining if not release.late_changes.is_kept(p)]
        refuse_sparse([(p, p.grad) for p in remaining], type(self).__name__)
        sent = [(p, self.host.send(p, p.grad)) for p in remaining if p.grad is not None]
        for param, one in sent:
            self.host.receive(param, one)

    def _split(self) -> SplitWeights | None:
        return optimizer_hooks.find(self, SplitWeights)


_RUNTIME = ("before", "_handles", "lock", "_worker", "_begun")


def releasing(optimizer: Optimizer) -> ReleaseGradients | None:
    """Return the `ReleaseGradients` of an optimizer from `wrap`, also on the host, or None."""
    return optimizer_hooks.find(optimizer, ReleaseGradients)


def _moved(states: Any, device: Any) -> Any:
    """Return a parameter's states on another device; counters of steps stay on the host."""
    return {
        name: value if name == "step" else tree_map_only(Tensor, lambda x: x.to(device), value)
        for name, value in states.items()
    }


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for options, group in zip(source, target, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
