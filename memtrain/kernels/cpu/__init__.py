"""The C++ kernels: a plain C library, found beside this file, loaded once through ctypes."""

import ctypes
import struct
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from memtrain.kernels.cpu.sources import digest

PATH = Path(__file__).with_name("libmemtrain.so")
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype -> its number in the kernels' arguments, as halves.h has it."""


@cache
def library() -> ctypes.CDLL | None:
    """The loaded C++ library, or None (with one warning) where it was not built of its sources."""
    loaded = ctypes.CDLL(str(PATH)) if PATH.exists() else None
    if loaded is not None and digest() in ("", _built_of(loaded)):
        return loaded
    why = "not built (no compiler at install time)"
    if loaded is not None:
        why = "built of other sources than those beside them (`make kernels` builds them again)"
    warnings.warn(
        f"memtrain's C++ kernels were {why}; the pure-torch reference serves CPU tensors, many "
        "times slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _built_of(loaded: ctypes.CDLL) -> str:
    sources = getattr(loaded, "mt_sources", None)
    if sources is None:
        return "an older library's"
    sources.restype = ctypes.c_char_p
    return sources().decode()


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Call `name` of the C++ library: tensors as pointers, integers as int64, floats as float.

    Addresses may be given as integers, too.

    The number of threads (torch's own) is passed last, as an int64.

    Args:
        name: An exported symbol.
        *arguments: What the symbol takes, in order; `None` is a null pointer.

    Raises:
        RuntimeError: If the library was not built.
    """
    lib = library()
    if lib is None:
        raise RuntimeError(f"the C++ library with {name!r} was not built")
    function = getattr(lib, name)
    if function.argtypes is None:  # found at the first call: C's types are the same at every one
        function.argtypes = [*map(_c_type, arguments), ctypes.c_int64]
    values = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    function(*values, torch.get_num_threads())


@cache
def packed(name: str, count: int) -> tuple[Callable[[bytes], None], Callable[..., bytes]]:
    """A function of the C++ library that takes its arguments as one struct of 8-byte integers.

    `ctypes` takes longer to convert an argument than a small kernel to work on a block.

    Args:
        name: An exported symbol of the library, which must be there.
        count: How many integers the struct holds, addresses among them.

    Returns:
        run: The function, to be given what `pack` made.
        pack: Makes the struct of so many integers; tensors whose addresses are among them must
            outlive the call.
    """
    function = getattr(library(), name)
    function.restype = None
    return function, struct.Struct(f"{count}q").pack


def _c_type(value: Tensor | int | float | None) -> type:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(value, float) else ctypes.c_int64
