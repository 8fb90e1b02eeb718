"""Names of the tensors that a forward computes, by what a torch function does to its arguments."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memtrain.activations.saved.origin import foreign, storage_id
from memtrain.activations.saved.site import Site, tensors_of
from memtrain.kernels.floats.rounding import DTYPES

# Matrix products, by the torch function's name without underscores at either end. What a function
# of several GEMMs does inside (an LSTM, multi-head attention) is one operator.
_GEMMS = """
linear bilinear matmul rmatmul mm bmm mv dot addmm addmv addbmm baddbmm einsum tensordot
chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
convolution scaled_dot_product_attention multi_head_attention_forward
lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""

# Their results hold elements of their first argument, and keep its name.
_COPIES = """
contiguous clone reshape flatten to float half bfloat16 type type_as cpu cuda getitem detach
index_select roll flip unfold repeat repeat_interleave tile
"""

# They read no element of a weight: it need not be rounded for them.
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
    """Names the results of the ops of one forward, and maps storages to these names.

    A tensor of training is a floating-point result of an op with memory of its own: views, copies
    and casts have the name of the tensor that they come from, and single numbers (losses) none.
    Names are `module / op / output`, then `output1` and on where a module runs an op again.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all storages, before a forward and after it."""
        self._calls: Counter[tuple[str, str]] = Counter()
        # Held, so that no other storage takes the same id while the forward runs.
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._versions: dict[int, int] = {}
        self._parameters: dict[int, str] = {}

    def begin(self, model: nn.Module) -> None:
        """Begin a forward, with the parameters that the model has now (a trace has its own)."""
        self.clear()
        for name, parameter in model.named_parameters():
            self._parameters[id(parameter)] = name

    def parameter(self, x: Tensor) -> str:
        """Give the name of the parameter that `x` is or is a view of, or an empty string."""
        return self._parameters.get(id(x if x._base is None else x._base), "")

    def name_of(self, x: Tensor) -> str:
        """Give the name of the tensor whose elements `x` holds, or an empty string."""
        found = self._names.get(storage_id(x))
        return found[1] if found else ""

    def inputs(self, module: str, values: Any) -> list[tuple[str, Tensor]]:
        """Name the inputs of the outermost module that are tensors of training."""
        leaves = [x for x in tree_leaves(values) if isinstance(x, Tensor) and roundable(x)]
        return [(self._name(module, "input", x, "input"), x) for x in leaves]

    def note_versions(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note the versions of an op's arguments, before it may change them in place."""
        self._versions = {id(x): _version(x) for x in tensors_of(args, kwargs)}

    def results(
        self, module: str, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> list[tuple[str, Tensor]]:
        """Name the results of the op whose arguments `note_versions` saw."""
        given = list(tensors_of(args, kwargs))
        read = {storage_id(x) for x in given}
        found = []
        for y in _flat(result):
            changed = id(y) in self._versions and _version(y) != self._versions[id(y)]
            if storage_id(y) in read and not changed:
                continue
            if op in COPIES and given:
                self._copy_name(y, given[0])
            elif roundable(y):
                found.append((self._name(module, op, y, "output"), y))
        if op == "setitem" and given:
            self.forget(given[0])
        return found

    def assign(self, x: Tensor, name: str) -> None:
        """Give the storage of `x` a name."""
        self._names[storage_id(x)] = (StorageWeakRef(x.untyped_storage()), name)

    def forget(self, x: Tensor) -> None:
        """Remove the name of the storage of `x`."""
        self._names.pop(storage_id(x), None)

    def _copy_name(self, y: Tensor, x: Tensor) -> None:
        name = self.name_of(x) or self.parameter(x)
        if name and not foreign(y):
            self.assign(y, name)

    def _name(self, module: str, op: str, x: Tensor, role: str) -> str:
        call = self._calls[module, op]
        self._calls[module, op] += 1
        name = Site(module, op, f"{role}{call or ''}").name
        self.assign(x, name)
        return name


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument in place.

    Example:
        >>> writes("add_", {}), writes("__iadd__", {}), writes("__add__", {}), writes("add", {})
        (True, True, False, False)
    """
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def roundable(x: Tensor) -> bool:
    """Whether a tensor is a tensor of training: more than one float.

    Example:
        >>> roundable(torch.ones(2)), roundable(torch.tensor(1.0)), roundable(torch.tensor([1, 2]))
        (True, False, False)
    """
    return x.dtype in DTYPES and x.numel() > 1 and not foreign(x)


def _flat(result: Any) -> Iterable[Tensor]:
    values = result if isinstance(result, tuple | list) else (result,)
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
        elif isinstance(value, tuple | list):
            yield from _flat(value)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
