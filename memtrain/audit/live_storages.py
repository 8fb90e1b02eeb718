"""Count the bytes of live storages by watching their allocation: no formula, no hook."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
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

    Args:
        peak: Also keep the highest number of bytes alive after any op (a sweep over the live
            storages whenever that could have risen: a real step takes noticeably longer).

    Example:
        >>> x = torch.ones(256, requires_grad=True)
        >>> with LiveStorages() as live:
        ...     y = x.sin().cos()          # cos keeps x.sin(); sin keeps x, which is older
        >>> live.nbytes(exclude=[y]), live.nbytes()
        (1024, 2048)
    """

    def __init__(self, *, peak: bool = False) -> None:
        super().__init__()
        self._refs: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._keep_peak = peak
        self._peak = 0
        self._bound = 0  # no fewer bytes than are alive: a sweep is needed only above the peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op and register the storages of its results that its arguments did not bring."""
        kwargs = kwargs or {}
        given = {storage._cdata for storage in storages(tree_leaves((args, kwargs)))}
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): first seen as argument
            given.clear()
        result = func(*args, **kwargs)
        for storage in storages(tree_leaves(result)):
            if storage._cdata not in given or storage._cdata in self._refs:
                self._register(storage)
        if self._keep_peak and self._bound > self._peak:
            self._sweep()
        return result

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count these older tensors too (weights, optimizer states), as long as they live.

        Args:
            tensors: Any tensors; shared storages count once.

        Example:
            >>> weight = torch.ones(256)
            >>> with LiveStorages(peak=True) as live:
            ...     live.adopt([weight])
            >>> live.nbytes(), live.peak_nbytes
            (1024, 1024)
        """
        for storage in storages(tensors):
            self._register(storage)
        if self._keep_peak:
            self._sweep()

    def nbytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """Bytes alive now.

        Args:
            exclude: Tensors whose storages are not to count (the loss, the model's outputs).

        Returns:
            The sum over live registered storages, each at its present size.
        """
        left_out = {storage._cdata for storage in storages(exclude)}
        self._sweep()
        return sum(size for key, size in self._sizes.items() if key not in left_out)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive after any op; needs `peak=True`.

        Raises:
            RuntimeError: If the meter was made without `peak=True`.
        """
        if not self._keep_peak:
            raise RuntimeError("peak_nbytes needs LiveStorages(peak=True)")
        return self._peak

    def _register(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._refs:
            # The weak reference keeps the address from being reused, so that keys stay unique.
            self._refs[key] = StorageWeakRef(storage)
        self._bound += max(0, size - self._sizes.get(key, 0))
        self._sizes[key] = size

    def _sweep(self) -> None:
        for key, ref in list(self._refs.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._refs[key], self._sizes[key]
            else:
                self._sizes[key] = storage.nbytes()
        self._bound = sum(self._sizes.values())
        self._peak = max(self._peak, self._bound)


def storage_nbytes(tensors: Iterable[Tensor], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages behind some tensors.

    Args:
        tensors: Any tensors; views of one storage count once, and in full.
        exclude: Tensors whose storages are not to count.

    Returns:
        Bytes.

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

    Args:
        forward: Runs the model (and the loss) and returns tensors in any nesting; what it stores
            elsewhere counts too.
        exclude: Further tensors not to count.

    Returns:
        Bytes, and what `forward` returned.

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
