"""Names of the tensors of a forward, from the effect of each torch function on its arguments."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.saved.origin import storage_id, unsupported
from memtrain.activations.saved.site import Site, tensors_of
from memtrain.kernels.floats.rounding import DTYPES

# Matrix products, by the torch function's name without underscores at its ends. A function with
# several GEMMs inside (an LSTM, multi-head attention) is one operator.
_GEMMS = """
linear bilinear matmul rmatmul mm bmm mv dot addmm addmv addbmm baddbmm einsum tensordot
chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
convolution scaled_dot_product_attention multi_head_attention_forward
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""

# Functions whose results contain elements of their first argument, and have its name.
_COPIES = """
contiguous clone reshape flatten to float half bfloat16 type type_as cpu cuda getitem detach
index_select roll flip unfold repeat repeat_interleave tile
"""

# Functions that read no element of a weight, which is not rounded for them.
_METADATA = """
size dim numel nelement ndimension stride element_size get_device data_ptr storage_offset
untyped_storage storage is_contiguous is_floating_point is_complex is_tensor is_set_to is_pinned
is_storage is_same_size is_inference requires_grad_ register_hook retain_grad has_names len repr
hash str format deepcopy detach_ result_type can_cast zeros_like ones_like empty_like full_like
rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
register_post_accumulate_grad_hook
"""

GEMMS, COPIES, METADATA = (frozenset(names.split()) for names in (_GEMMS, _COPIES, _METADATA))
_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")


class TensorNames:
    """Names the results of a forward's ops, and maps storages to these names.

    A tensor of training is a floating-point result with its own memory and more than one element.
    Views, copies and casts have the name of their source. Names are `module / op / output`, then
    `output1` and so on if a module repeats an op.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Clear all storages, before and after a forward."""
        self._calls: Counter[tuple[str, str]] = Counter()
        # Weak references, so that no other storage gets the same id during the forward.
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._versions: dict[int, int] = {}
        self._parameters: dict[int, str] = {}

    def begin(self, model: nn.Module) -> None:
        """Begin a forward with the current parameters of the model (a trace replaces them)."""
        self.clear()
        for name, parameter in model.named_parameters():
            self._parameters[id(parameter)] = name

    def parameter(self, x: Tensor) -> str:
        """Return the name of the parameter that `x` is or is a view of, or an empty string."""
        return self._parameters.get(id(x if x._base is None else x._base), "")

    def name_of(self, x: Tensor) -> str:
        """Return the name of the tensor whose elements `x` has, or an empty string."""
        found = self._names.get(storage_id(x))
        return found[1] if found else ""

    def inputs(self, module: str, values: Any) -> list[tuple[str, Tensor]]:
        """Name the outermost module's inputs that are tensors of training."""
        leaves = [x for x in tree_leaves(values) if isinstance(x, Tensor) and roundable(x)]
        return [(self._name(module, "input", x, "input"), x) for x in leaves]

    def note_versions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the versions of an op's arguments, before in-place changes."""
        self._versions = {id(x): _version(x) for x in tensors_of(args, kwargs)}

    def results(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> list[tuple[str, Tensor]]:
        """Name the results of the op after `note_versions`."""
        inputs = list(tensors_of(args, kwargs))
        read = {storage_id(x) for x in inputs}
        found = []
        for y in _flat(result):
            changed = id(y) in self._versions and _version(y) != self._versions[id(y)]
            if storage_id(y) in read and not changed:
                continue
            if op in COPIES and inputs:
                self._copy_name(y, inputs[0])
            elif roundable(y):
                found.append((self._name(module, op, y, "output"), y))
        if op == "setitem" and inputs:
            self.forget(inputs[0])
        return found

    def assign(self, x: Tensor, name: str) -> None:
        """Name the storage of `x`."""
        self._names[storage_id(x)] = (StorageWeakRef(x.untyped_storage()), name)

    def forget(self, x: Tensor) -> None:
        """Remove the name of the storage of `x`."""
        self._names.pop(storage_id(x), None)

    def _copy_name(self, y: Tensor, x: Tensor) -> None:
        name = self.name_of(x) or self.parameter(x)
        if name and not unsupported(y):
            self.assign(y, name)

    def _name(self, module: str, op: str, x: Tensor, role: str) -> str:
        call = self._calls[module, op]
        self._calls[module, op] += 1
        name = Site(module, op, f"{role}{call or ''}").name
        self.assign(x, name)
        return name


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes its first argument in place.

    Example:
        >>> writes("add_", {}), writes("__iadd__", {}), writes("__add__", {}), writes("add", {})
        (True, True, False, False)
    """
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def roundable(x: Tensor) -> bool:
    """Return whether a tensor is a tensor of training: more than one float."""
    return x.dtype in DTYPES and x.numel() > 1 and not unsupported(x)


def _flat(result: Any) -> Iterable[Tensor]:
    values = result if isinstance(result, tuple | list) else (result,)
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
        elif isinstance(value, tuple | list):
            yield from _flat(value)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
