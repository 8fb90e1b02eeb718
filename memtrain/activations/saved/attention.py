"""Recomputes the result of fused attention for the queries and keys that its backward reads.

The backward takes exp(q k - lse). With the exact log-sum-exp, the error of coded queries and keys
would be in an exponent: probabilities would no longer sum to 1, and would overflow for large
logits. One forward of the same op gives the result and the log-sum-exp of the decoded tensors. The
gradient is then the exact gradient of attention at these tensors: it is finite wherever they are.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.activations.saved.handles import Kept
from memtrain.activations.saved.store import check_version, without_elements
from memtrain.compressors import Compressor


class Kernel(NamedTuple):
    """A kernel of fused attention, and the attributes under which its node holds tensors."""

    forward: Any
    backward: Any
    inputs: tuple[str, ...]
    """Query, key and value, and the mask where the kernel takes one."""
    results: tuple[str, str]
    options: Mapping[str, Any]


def _kernel(op: str, mask: str, sums: str = "logsumexp", **options: Any) -> Kernel:
    inputs = ("query", "key", "value", *([mask] if mask else []))
    ops = [getattr(torch.ops.aten, f"_scaled_dot_product_{op}{end}") for end in ("", "_backward")]
    return Kernel(ops[0].default, ops[1].default, inputs, ("output", sums), options)


_KERNELS = {
    "FlashAttentionForCpu": _kernel("flash_attention_for_cpu", "attn_mask"),
    "FlashAttention": _kernel("flash_attention", ""),
    "EfficientAttention": _kernel(
        "efficient_attention", "attn_bias", "log_sumexp", compute_log_sumexp=True
    ),
    "CudnnAttention": _kernel("cudnn_attention", "attn_bias", compute_log_sumexp=True),
    "FusedAttentionOverrideable": _kernel("fused_attention_overrideable", "attn_bias"),
}
KERNELS: dict[type, Kernel] = {
    node: kernel
    for name, kernel in _KERNELS.items()
    if (node := getattr(torch._C._functions, f"ScaledDotProduct{name}Backward0", None))  # pyright: ignore[reportAttributeAccessIssue]
}
"""Class of a node -> the kernel that it is the backward of."""


class FusedAttention:
    """The tensors that one backward of fused attention reads."""

    def __init__(self, node: Any, kernel: Kernel, saved: Mapping[str, Tensor]) -> None:
        self._kernel, self.output = kernel, kernel.results[0]
        options = ((name, getattr(node, f"_saved_{name}", None)) for name in ("scale", "is_causal"))
        self._options = {**kernel.options, **dict(options)}
        self._drops = bool(getattr(node, "_saved_dropout_p", 0.0))
        self._is_lossy = False
        self._inputs: dict[str, Any] = {
            name: Kept(saved[name], saved[name].detach()) for name in kernel.inputs if name in saved
        }
        self._decoded: dict[str, weakref.ref[Tensor]] = {}
        self._results: dict[str, Tensor] = {}  # computed, and not read yet
        self._versions: dict[str, tuple[Tensor, int]] = {}

    def add(self, attribute: str, handle: Any, compressor: Compressor | None) -> bool:
        """Add the handle of a saved tensor; return whether it is an input.

        The compressor is None where the tensor comes back bit for bit.
        """
        if attribute not in self._kernel.inputs:
            return False
        self._inputs[attribute] = handle
        self._is_lossy |= compressor is not None and not compressor.lossless
        return True

    def recomputes(self, attribute: str, x: Tensor, is_coded: Callable[[], bool]) -> bool:
        """Return whether a saved tensor is recomputed: with dropout, not the result.

        It is if an input is coded, or if it would be itself: the gradient of scores is
        a difference of what is computed of the values and of the result.
        """
        if attribute not in self._kernel.results[self._drops :]:
            return False
        self._is_lossy = self._is_lossy or is_coded()
        if not self._is_lossy:
            return False
        self._versions[attribute] = without_elements(x), x._version
        return True

    @property
    def inputs(self) -> Iterable[Any]:
        """Return the handles of the inputs."""
        return self._inputs.values()

    def unpack(self) -> Tensor:
        """Return the output for another op, and leave it to the backward of attention."""
        if self.output not in self._results:
            self._results = self.results()
        return self._results[self.output]

    def read(self, attribute: str) -> Tensor:
        """Return an input or a result for the backward.

        An input is decoded once for the forward and the backward, which hold it meanwhile.
        """
        if attribute in self._versions:
            check_version(*self._versions[attribute])
            if attribute not in self._results:
                self._results = self.results()
            return self._results.pop(attribute)
        reference = self._decoded.get(attribute)
        x = None if reference is None else reference()
        if x is None:
            x = self._inputs[attribute].unpack()
            self._decoded[attribute] = weakref.ref(x)
        return x

    def results(self) -> dict[str, Tensor]:
        """Compute the results that a backward reads from the inputs as they are stored now."""
        names = self._kernel.inputs
        x = [self.read(name) if name in self._inputs else None for name in names]
        masks = dict(zip(names[3:], x[3:], strict=True))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            found = self._kernel.forward(*x[:3], **masks, **self._options)
        wanted = self._kernel.results[self._drops :]
        return dict(zip(wanted, found[self._drops : 2], strict=True))
