"""Triton without a GPU: its own launch path compiles for sm_90, and `ptx` executes what it made.

It must run without TRITON_INTERPRET, which is read when kernels are decorated.
"""

import gc
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.runtime.cache import get_cache_manager

from benchmarks.machine_code import ARCHITECTURE, resources
from memtrain import kernels
from memtrain.kernels import device_guard
from tests.kernels.ptx.kernel import Kernel
from tests.kernels.ptx.memory import Fault, Memory
from tests.kernels.ptx.program import parse


def execute_launches(driver: "Execution") -> None:
    """Let `execute` stand in for `device_guard.launch` in every module that launches."""
    triton.runtime.driver.set_active(driver)
    own, device_guard.launch = device_guard.launch, execute
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if not info.name.endswith((".libmemtrain", ".calls")):
            module = importlib.import_module(info.name)
            if getattr(module, "launch", None) is own:
                module.launch = execute


class Execution:
    """A driver that executes what was compiled, on tensors of the CPU.

    Args:
        seed: Moves the results of approximate instructions; None: nothing does.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.utils = self
        self._seed = seed
        # Each has some 20,000 Python objects, among which the tensors of a launch are looked for.
        self._kernel = lru_cache(maxsize=16)(self._read)

    def get_current_device(self) -> int:
        """A number that no device has: what is compiled is kept by it."""
        return -1

    def get_current_stream(self, device: int) -> int:
        """A stream's number."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What a launch may take: an H100's."""
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, binary: bytes, *given: Any) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the most threads of a program."""
        found = resources(binary)
        if found["STACK"] or found["LOCAL"]:
            raise Fault(f"{name} uses a stack or spills registers: {found}")
        return self, None, 0, 0, 1024

    def _read(self, hashed: str, name: str, fuse: bool, shared: int) -> Kernel:
        """A kernel that Triton has compiled."""
        text = Path(get_cache_manager(hashed).get_file(f"{name}.ptx")).read_text()
        return Kernel(parse(text, fuse=fuse), shared, self._seed)

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls for each launch of a compiled kernel."""
        known = metadata.hash, metadata.name, metadata.enable_fp_fusion, metadata.shared
        constant = {path[0] for path in src.constants}

        def run(*given: Any) -> None:
            kernel, grid, arguments = self._kernel(*known), given[:3], given[9:]
            values = [x for k, x in enumerate(arguments) if k not in constant]
            addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
            addresses += [0] * (len(kernel.program.parameters) - len(values))  # Triton's own
            memory = Memory(_ranges(values), lambda: list(_ranges(gc.get_objects())))
            kernel.launch(grid, addresses, memory)

        return run


def execute(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """In place of `device_guard.launch`: as it launches on CUDA tensors."""
    device_guard.launch_cached(kernel, grid, arguments, options, 0)


def _ranges(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Where the tensors among some values lie: tables hold the addresses of others."""
    for x in values:
        if issubclass(type(x), Tensor) and type(x) is not FakeTensor and x.is_cpu:
            storage = x.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
