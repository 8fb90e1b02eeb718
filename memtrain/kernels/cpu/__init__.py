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
    """Return the C++ library, or None (with one warning) if it was not built from its sources."""
    loaded = ctypes.CDLL(str(PATH)) if PATH.exists() else None
    if loaded is not None and digest() in ("", _built_of(loaded)):
        return loaded
    why = "not built (no compiler at install time)"
    if loaded is not None:
        why = "built from other sources (`make kernels` rebuilds them)"
    warnings.warn(
        f"memtrain's C++ kernels were {why}; CPU tensors use the pure-torch reference, which is "
        "many times slower",
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
    """Call `name` of the C++ library with a struct: tensors as addresses, then torch's threads.

    `None` is a null pointer.
    """
    if library() is None:
        raise RuntimeError(f"the C++ library with {name!r} was not built")
    kinds = "".join(["d" if isinstance(x, float) else "q" for x in arguments])
    run, pack = packed(name, f"{kinds}q")
    values = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for x in arguments]
    run(pack(*values, torch.get_num_threads()))


@cache
def packed(name: str, fields: str) -> tuple[Callable[[bytes], None], Callable[..., bytes]]:
    """Return a function of the C++ library, and the packer of its struct for the given fields.

    `ctypes` takes longer to convert an argument than a small kernel to process a block, so each
    function takes its arguments as one struct of 8-byte numbers. Tensors whose addresses are in the
    struct must outlive the call.
    """
    function = getattr(library(), name)
    function.restype = None
    return function, struct.Struct(fields).pack
