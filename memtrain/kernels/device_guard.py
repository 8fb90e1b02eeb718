"""Launches of Triton kernels on the device where their tensors lie, at little cost to the host."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...]]] = {}
"""Kernel, what was compiled of it, and its constants, by all that Triton compiles for."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a `@triton.jit` kernel on the device of its first argument, a tensor.

    Triton compiles for the *current* CUDA device and queues the launch on that device's stream: a
    kernel with addresses of another device would fault. The options are the kernel's constants and
    the launch's options.
    """
    device = arguments[0].device
    if device.type != "cuda":
        kernel[grid](*arguments, **options)
        return
    is_current = device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(device):
        if torch.version.hip is None:
            launch_cached(kernel, grid, arguments, options, device.index)
            return
        # Triton compiles for more there: whether a tensor has 2 GiB or more.
        lanes = torch.cuda.get_device_properties(device).warp_size
        kernel[grid](*arguments, **for_amd(options, lanes))


def launch_cached(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    device: int,
) -> None:
    """Launch the binary that was compiled for this signature on the current device.

    Triton's own launch finds the binary with more checks, which take twice the host's time
    (`benchmarks/results/launch.csv`).

    Raises:
        TypeError: If a constant is among the arguments, whose values do not select a binary.
    """
    signature = [id(kernel), device, *options, *options.values()]
    for x in arguments:  # a binary is for types, whole addresses, and integers of these kinds
        if type(x) is int:
            signature += x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
        elif isinstance(x, Tensor):
            signature += x.dtype, x.data_ptr() % 16 == 0
        else:
            signature += type(x), None if type(x) is float else x
    key = tuple(signature)
    known = _compiled.get(key)
    if known is not None:
        _, made, constants = known
        made[(*grid, 1, 1)[:3]](*arguments, *constants)
        return
    if any(one.is_constexpr for one in getattr(kernel, "params", ())[: len(arguments)]):
        raise TypeError(f"{kernel}: a constant among the arguments; allowed: by its name")
    made = kernel[grid](*arguments, **options)
    if made is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = kernel, made, tuple(options[name] for name in names)


def for_amd(options: Mapping[str, Any], lanes: int) -> dict[str, Any]:
    """Return launch options for Triton's compiler for AMD, whose warps have 64 or 32 `lanes`.

    AMD's compiler has no limit of registers, and a program has at most 1,024 threads.

    Example:
        >>> for_amd({"BITS": 4, "num_warps": 32, "maxnreg": 64}, 64)
        {'BITS': 4, 'num_warps': 16}
    """
    known = {key: value for key, value in options.items() if key != "maxnreg"}
    if "num_warps" in known:
        known["num_warps"] = min(known["num_warps"], 1024 // lanes)
    return known
