"""The C++ kernels: a plain C library, found beside this file, loaded once through ctypes."""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).with_name("libmemtrain.so")

_dataless = False


@contextmanager
def without_data() -> Iterator[None]:
    """Inside the block kernels that write in place do nothing: fake tensors have no data.

    Example:
        >>> with without_data():
        ...     call("a kernel that there is not")
    """
    global _dataless
    before, _dataless = _dataless, True
    try:
        yield
    finally:
        _dataless = before


def is_dataless() -> bool:
    """Whether this is inside a `without_data` block."""
    return _dataless


@cache
def library() -> ctypes.CDLL | None:
    """The loaded C++ library, or None (with one warning) where it was not built."""
    if not PATH.exists():
        warnings.warn(
            "memtrain's C++ kernels were not built (no compiler at install time); the pure-torch "
            "reference serves CPU tensors, many times slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return ctypes.CDLL(str(PATH))


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call `name` of the C++ library: tensors as pointers, integers as int64, floats as float.

    The number of threads (torch's own) is passed last, as an int64.

    Args:
        name: An exported symbol.
        *arguments: What the symbol takes, in order; `None` is a null pointer.

    Raises:
        RuntimeError: If the library was not built.
    """
    if _dataless:
        return
    lib = library()
    if lib is None:
        raise RuntimeError(f"the C++ library with {name!r} was not built")
    function = getattr(lib, name)
    if function.argtypes is None:  # found at the first call: C's types are the same at every one
        function.argtypes = [*map(_c_type, arguments), ctypes.c_int64]
    values = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    function(*values, torch.get_num_threads())


def call_raw(name: str, *values: int | float) -> None:
    """`call` with addresses in place of tensors, which must outlive it, and 0 for none: faster.

    Args:
        name: An exported symbol of the C++ library, which must be there.
        *values: What the symbol takes, in order.
    """
    function = getattr(library(), name)
    if function.argtypes is None:  # an address is an int64 as well
        function.argtypes = [*map(_c_type, values), ctypes.c_int64]
    function(*values, torch.get_num_threads())


def _c_type(value: Tensor | int | float | None) -> type:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(value, float) else ctypes.c_int64
