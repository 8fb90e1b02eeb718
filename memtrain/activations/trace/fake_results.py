"""Results of ops on fake tensors as they are on real ones, where torch's fake forms differ."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._subclasses.fake_impls import op_implementations_dict
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.activations.trace.rnn_workspace import rnn_workspace_nbytes
from memtrain.kernels.dispatch import is_for_cuda

_HALVES = (torch.float16, torch.bfloat16)
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_COL2IM = torch.ops.aten.col2im.default
_LOSSES = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
}
_GROUP_NORM = torch.ops.aten.native_group_norm.default
# Norm -> where among its arguments its parameters and running statistics are.
_NORMS = {
    torch.ops.aten.native_batch_norm.default: slice(1, 5),
    torch.ops.aten.native_layer_norm.default: slice(2, 4),
    _GROUP_NORM: slice(1, 3),
}


class RealResults(TorchDispatchMode):
    """Gives fake results the sizes and dtypes that they have on real tensors: see `as_real`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        return as_real(func, args, func(*args, **(kwargs or {})))


def as_real(func: Any, args: Any, result: Any) -> Any:
    """Return an op's fake result, fixed where torch's fake form differs from its kernels.

    oneDNN's LSTM keeps a workspace for its backward, of no bytes in the fake form (torch runs each
    layer and direction of an `nn.LSTM` on the CPU by it, in float32). A norm of 16-bit numbers
    whose parameters are in float32 has statistics in float32, in the fake form in 16 bits; on CUDA
    batch and layer norms have whatever their parameters are. `col2im` (`fold`, and the backward of
    `unfold`) makes its smaller result in memory of its input's size, and a loss its mean or sum in
    memory of one number per element.
    """
    if func is _LSTM:
        output, hidden, cell, workspace = result
        return output, hidden, cell, workspace.new_empty(rnn_workspace_nbytes(args[0], args[2]))
    if func is _COL2IM and result.numel() < args[0].numel():
        return args[0].new_empty(args[0].numel()).as_strided(result.shape, result.stride())
    if func in _LOSSES and not result.dim():
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return result.new_empty(max(1, elements)).as_strided((), ())
    if func in _NORMS and args[0].dtype in _HALVES:
        wide = is_for_cuda(args[0]) and func is not _GROUP_NORM
        if wide or _is_mixed(args[0], args[_NORMS[func]]):
            y, *statistics = result
            return y, *(t.new_empty(t.shape, dtype=torch.float32) for t in statistics)
    return result


def _is_mixed(x: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """As torch's `is_mixed_type`: whether the first of the parameters has another dtype."""
    first = next((p for p in parameters if p is not None), x)
    return first.dtype != x.dtype


def known_to_fake_tensors() -> None:
    """Let fake tensors run the grouped products that torch runs on data; its form wants bfloat16.

    How large a product's result is depends on shapes alone: groups are rows that lie one after
    another, whatever their sizes. Where this torch names its own rule otherwise, nothing is done:
    float32 is then refused by fake tensors, as before.
    """
    rule = getattr(_meta_registrations, "_create_grouped_mm_output_tensor", None)
    if rule is None:
        return

    def grouped_mm(
        mode: Any,
        func: Any,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        with mode:  # else the result would be a real tensor, of no values
            return rule(a, b, offs, out_dtype)

    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, grouped_mm)
