"""Copies of parameters in host memory, and what travels between them and their device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.optim.states.shards import is_sharded
from memtrain.optim.wrappers.host_copies import HostCopies
from memtrain.optim.wrappers.weights import set_dtype

Sent = tuple[Tensor, Any, tuple[Tensor, int] | None]
"""A gradient's copy, what `HostCopies.wait` takes, and the weight and its version if something
else wrote the weight since the last step."""


class HostParameters:
    """Copies of parameters in host memory, which receive gradients and send stepped weights."""

    def __init__(self, copies: Callable[[Tensor], HostCopies]) -> None:
        self.copies = copies
        self.leaves: dict[Tensor, nn.Parameter] = {}
        """Parameter -> its copy."""
        self._versions: dict[Tensor, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_versions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for param, leaf in self.leaves.items():
            leaf._stands_for = param  # pyright: ignore[reportAttributeAccessIssue]

    def add(self, params: Iterable[Tensor]) -> None:
        """Copy parameters to the host."""
        for param in params:
            leaf = nn.Parameter(param.detach().to("cpu", copy=True), param.requires_grad)
            leaf._stands_for = param  # pyright: ignore[reportAttributeAccessIssue]
            self.leaves[param] = leaf

    @torch.no_grad()
    def finish(self, params: Iterable[Tensor]) -> None:
        """Pin the copies, and give parameters the dtype of their copies, which may be split."""
        for param in params:
            leaf, copies = self.leaves[param], self.copies(param)
            if param.dtype != leaf.dtype:
                set_dtype(param, leaf.detach().to(param.device, copy=True))
            if copies.beside:
                leaf.data = copies.host_memory(leaf).copy_(leaf)
            self.matches(param)

    def group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group with the copies of its parameters."""
        return {**group, "params": [self.leaves[p] for p in group["params"]]}

    def check_dtypes(self) -> None:
        """Raise TypeError for a parameter whose dtype has changed."""
        for param, leaf in self.leaves.items():
            if param.dtype != leaf.dtype:
                raise TypeError(
                    f"a parameter of shape {tuple(param.shape)} is now {param.dtype}, but its "
                    f"copy in host memory is {leaf.dtype}: model.to(dtype), float() and half() "
                    "are for a model before wrap or after unwrap"
                )

    def send(self, param: Tensor, grad: Tensor) -> Sent:
        """Start the copy of a gradient to the host, and of a weight that something else wrote."""
        copies, weight, version = self.copies(param), None, param._version
        if self._versions.get(param) != version:
            weight = copies.to_host(param.detach())[0], version
        return *copies.to_host(grad), weight

    def receive(self, param: Tensor, sent: Sent) -> None:
        """Wait for the copies that `send` started, and set the gradient of the parameter's copy."""
        leaf, (grad, started, weight) = self.leaves[param], sent
        self.copies(param).wait(started)
        if weight is not None:
            leaf.copy_(weight[0])
            self._versions[param] = weight[1]
        leaf.grad = grad

    @torch.no_grad()
    def send_back(self, leaf: Tensor) -> None:
        """Start the copy of a stepped weight to its device."""
        param: Tensor = leaf._stands_for  # pyright: ignore[reportAttributeAccessIssue]
        self.copies(param).to_device(leaf.detach(), param.detach())
        self.matches(param)

    def join(self) -> None:
        """Make later work of the devices wait for the weights that were sent back."""
        for copies in {id(c): c for c in map(self.copies, self.leaves)}.values():
            copies.join()

    @torch.no_grad()
    def fetch_written(self) -> None:
        """Fetch the weights that something else has written."""
        for param, leaf in self.leaves.items():
            if self._versions.get(param) != param._version:
                leaf.copy_(param)
                self.matches(param)

    def matches(self, param: Tensor) -> None:
        """Record that a parameter equals its copy."""
        self._versions[param] = param._version

    def fetch_all(self) -> None:
        """Fetch every weight before its next step."""
        self._versions.clear()


def check_whole(params: Iterable[Tensor]) -> None:
    """Raise ValueError for a parameter whose states cannot be stepped on the host."""
    for param in params:
        if is_sharded(param):
            raise ValueError(
                f"optim.device='cpu' with a sharded parameter of shape {tuple(param.shape)}: its "
                "collectives need the device; allowed for it: optim.device=keep"
            )
