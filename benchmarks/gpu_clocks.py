"""Times, launches and waits of a call on a GPU, and rows for what fails."""

import gc
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]


class Scale(NamedTuple):
    """Where a step runs, how much of it, and the file of its rows."""

    device: str
    tiny: bool
    out: Path

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def clear(self) -> None:
        """Hand memory back.

        Raises:
            RuntimeError: If a kernel has faulted: no other runs in this process.
        """
        gc.collect()
        self.sync()
        if self.device == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()


def clocks(call: Callable[[], object], scale: Scale, rounds: int = 10) -> Row:
    """Milliseconds of one call: wall, host (until it returns), and the device's kernels."""
    warm, rounds = (0, 1) if scale.tiny else (3, rounds)
    for _ in range(warm):
        call()
    wall, host = [], []
    for _ in range(rounds):
        scale.sync()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        scale.sync()
        wall.append(time.perf_counter() - start)
    row: Row = {"wall_ms": 1e3 * statistics.median(wall), "host_ms": 1e3 * statistics.median(host)}
    return row | kernels(call, scale)


def kernels(call: Callable[[], object], scale: Scale) -> Row:
    """Milliseconds of the device's kernels and copies in one call, and how many there were."""
    if scale.device != "cuda":
        return {"kernel_ms": 0.0, "launches": 0, "copies": 0}
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        scale.sync()
    on_device = torch.autograd.DeviceType.CUDA
    events = [
        event
        for event in profile.events()
        if event.device_type == on_device and not getattr(event, "is_user_annotation", False)
    ]
    copies = [event for event in events if event.name.startswith(("Memcpy", "Memset"))]
    longest: Counter[str] = Counter()
    for event in events:
        longest[event.name[:80]] += event.time_range.elapsed_us()
    return {
        "kernel_ms": sum(longest.values()) / 1e3,
        "launches": len(events) - len(copies),
        "copies": len(copies),
        "longest_us": dict(longest.most_common(8)),
    }


def guarded(label: Row, find: Callable[[], Row]) -> Row:
    """A row, or one that says why there is none: one failure does not cost the rows after it."""
    try:
        return label | find()
    except Exception as error:  # noqa: BLE001 - whatever is raised is the row
        trace = "".join(traceback.format_exception(error)[-4:])
        print(trace, file=sys.stderr)
        return label | {"error": f"{type(error).__name__}: {str(error)[:500]}", "trace": trace}


def waits(step: Callable[[], None], scale: Scale) -> Row:
    """How often a call waits for the device, and from where."""
    places: Counter[str] = Counter()

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):  # not the mode's warning of itself
            frames = [f for f in traceback.extract_stack() if "benchmarks" not in f.filename][-6:]
            places[" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1])] += 1

    scale.sync()
    mode = torch.cuda.set_sync_debug_mode if scale.device == "cuda" else lambda level: None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        mode("warn")
        try:
            step()
        finally:
            mode("default")
    return {"waits": sum(places.values()), "places": dict(places.most_common(20))}
