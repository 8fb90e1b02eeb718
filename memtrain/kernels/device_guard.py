"""Launches of Triton kernels on the device where their tensors lie."""

from collections.abc import Mapping
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on its first argument's device, whichever is current.

    Triton compiles for the *current* CUDA device and queues the launch on that device's stream: a
    kernel with addresses of another device would fault.

    Args:
        kernel: A `@triton.jit` function.
        grid: Programs along each axis.
        *arguments: The kernel's, a tensor first.
        **options: The kernel's constants, and the launch's options.
    """
    device = arguments[0].device
    if torch.version.hip is not None and device.type == "cuda":
        options = for_amd(options, torch.cuda.get_device_properties(device).warp_size)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)


def for_amd(options: Mapping[str, Any], lanes: int) -> dict[str, Any]:
    """A launch's options as Triton's compiler for AMD takes them.

    It knows no limit of registers, and 1,024 threads of a program are the most, as of NVIDIA's,
    whose warps have 32 lanes.

    Args:
        options: Those of `launch`.
        lanes: Of a warp: 64, or 32.

    Example:
        >>> for_amd({"BITS": 4, "num_warps": 32, "maxnreg": 64}, 64)
        {'BITS': 4, 'num_warps': 16}
    """
    known = {key: value for key, value in options.items() if key != "maxnreg"}
    if "num_warps" in known:
        known["num_warps"] = min(known["num_warps"], 1024 // lanes)
    return known
