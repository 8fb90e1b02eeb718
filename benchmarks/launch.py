"""Time of the host's Python in a launch of a Triton kernel, beside Triton's own launch.

    python -m benchmarks run launch --clock cpu

No GPU is needed: the driver compiles for one and launches nothing, so that what CUDA's own call
takes is left out on both sides. The kernel is the group quantiser, of eight arguments and ten
constants and options, of a tensor as small as in a benchmark of the host.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.harness import Benchmark, Job, Options, Row, Trial, require, timed
from benchmarks.machine_code import ARCHITECTURE


class NoDevice:
    """A driver of Triton's as far as compiling asks for one."""

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


class NoLaunch(NoDevice):
    """A driver that writes down what it would launch."""

    def __init__(self) -> None:
        self.utils = self
        self.launched: tuple[Any, ...] = ()

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What a launch may take: an H100's."""
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, *given: Any) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the most threads of a program."""
        return self, None, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """What Triton calls for each launch of a compiled kernel."""

        def run(*given: Any) -> None:
            self.launched = (*given[:3], *given[9:])  # grid and arguments

        return run


def _build() -> Trial:
    import triton

    from memtrain.kernels.device_guard import launch_again
    from memtrain.kernels.group import group_triton

    driver, known = NoLaunch(), []
    triton.runtime.driver.set_active(driver)  # until `_run` ends
    own = group_triton.launch
    group_triton.launch = lambda kernel, grid, *given, **options: known.append(
        (kernel, grid, given, options)
    )
    try:
        codes = torch.empty(8, 128, dtype=torch.uint8)
        bounds = torch.empty(8, 2, dtype=torch.bfloat16)
        group_triton.quantize(torch.randn(2048), codes, bounds, 4, 256, 7, stochastic=True)
    finally:
        group_triton.launch = own
    ((kernel, grid, given, options),) = known

    def again() -> None:
        launch_again(kernel, grid, given, options, driver.get_current_device())

    def tritons() -> None:
        kernel[grid](*given, **options)

    def gate() -> None:
        tritons()
        expected = driver.launched
        for _ in range(2):  # by Triton, then by what it compiled
            driver.launched = ()
            again()
            same = zip(driver.launched, expected, strict=True)
            require(all(a is b or a == b for a, b in same), "another grid, or other arguments")

    return Trial(ours=again, theirs=tritons, gate=gate, elements=1, metered=False)


def _run(job: Job) -> list[Row]:
    import triton

    try:
        return job.run()
    finally:
        triton.runtime.driver.set_active(None)  # the machine's own, where it is asked for again


def _jobs(options: Options) -> list[Job]:
    job = timed("group quantiser", {"kernel": "group_quantize"}, _build, options)
    return [job._replace(run=partial(_run, job))]


BENCHMARK = Benchmark(
    "launch",
    "the host's Python in a launch of a Triton kernel, beside Triton's own launch",
    _jobs,
    ("kernel", "ours_ms_p50", "theirs_ms_p50", "ratio_p50"),
)
