"""Count the bytes of live storages, without formulas or hooks."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class LiveStorages(TorchDispatchMode):
    """Registers every storage created inside a `with` block and counts the bytes still alive.

    A storage counts once, however many views share it, at its present size, also after a resize,
    until its last owner lets go; the meter itself keeps nothing alive. It sits below autograd and
    saved-tensor hooks, so plain and wrapped models count the same, and it goes on counting after
    the block has ended (but registers no more). What an op allocates inside itself and frees before
    it returns is not seen; nor are tensors of opaque layouts. It sees fake and meta tensors at
    their nominal size.

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> with LiveStorages() as live:
        ...     y = x.sin().cos()          # cos keeps x.sin(); sin keeps x, which is older
        >>> live.nbytes(exclude=[y]), live.nbytes()
        (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.peak_nbytes = 0
        """The most bytes alive after any op; a storage that no op has resized has its old size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op and register the storages of its results that its arguments did not bring."""
        kwargs = kwargs or {}
        inputs = {storage._cdata for storage in storages(tree_leaves((args, kwargs)))}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): first seen as argument
            inputs.clear()
        result = func(*args, **kwargs)
        for storage in storages(tree_leaves(result)):
            if storage._cdata not in inputs or storage._cdata in self._refs:
                self._register(storage)
        return result

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count these older tensors too (weights, optimizer states), as long as they live.

        Example:
            >>> weight = torch.ones(256)
            >>> with LiveStorages() as live:
            ...     live.adopt([weight])
            >>> live.nbytes(), live.peak_nbytes
            (1024, 1024)
        """
        for storage in storages(tensors):
            self._register(storage)

    def nbytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """Bytes alive now, without the storages of `exclude` (the loss, the model's outputs)."""
        left_out = {storage._cdata for storage in storages(exclude)}
        alive = ((key, ref()) for key, ref in [*self._refs.items()])
        return sum(s.nbytes() for key, s in alive if s is not None and key not in left_out)

    def _register(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_nbytes = max(self.peak_nbytes, self._now)

    def _forget(self, key: int) -> None:
        del self._refs[key]
        self._now -= self._sizes.pop(key)


def storage_nbytes(tensors: Iterable[Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages behind some tensors.

    Views of one storage count once, and in full; storages of `exclude` do not.

    Example:
        >>> x = torch.zeros(4, 4)
        >>> storage_nbytes([x, x[0], x.T]), storage_nbytes([x], exclude=[x[1]])
        (64, 0)
    """
    left_out = {storage._cdata for storage in storages(exclude)}
    sizes = {storage._cdata: storage.nbytes() for storage in storages(tensors)}
    return sum(size for key, size in sizes.items() if key not in left_out)


def saved_nbytes(forward: Callable[[], T], exclude: Iterable[Tensor] = ()) -> tuple[int, T]:
    """Run a forward pass and count what it leaves alive besides its result: saved activations.

    Returns these bytes, without those of `exclude`, and the result: tensors in any nesting.

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> saved_nbytes(lambda: x.sin().cos())[0]
        1024
    """
    with LiveStorages() as live:
        result = forward()
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return live.nbytes(exclude=[*outputs, *exclude]), result


def storages(leaves: Iterable[Any]) -> Iterable[torch.UntypedStorage]:
    """The storages behind the tensors among some objects; those inside tensor subclasses too."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from storages(getattr(leaf, name) for name in names)
        elif leaf.layout == torch.strided:
            yield leaf.untyped_storage()
        elif leaf.layout == torch.sparse_coo:
            yield from storages((leaf._indices(), leaf._values()))
