"""The harness: a gate before every timing, rounds A B A B, quantiles, rows that explain themselves.

A benchmark is a list of jobs; a job returns rows. `timed` makes a job of a `Trial`: its gate runs
first, and what fails it is not timed; then each round times every side once, in turn, so that what
else the machine does hits all of them. One more side copies as many bytes as the tensors have: a
device's copy bandwidth is what a memory-bound kernel can be held against.
"""

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import memtrain
from memtrain.audit.live_storages import LiveStorages

RESULTS = Path(__file__).parent / "results"
LEAST_SECONDS = 2e-3  # a shorter call is repeated until a sample takes this long
QUICK_SECONDS = 1e-4

Row = dict[str, Any]


class GateError(Exception):
    """A benchmark computes something wrong: what it says about time means nothing."""


@dataclass(frozen=True)
class Options:
    """How to run: what the command line says."""

    device: str = "cpu"
    quick: bool = False
    full: bool = False
    rounds: int = 9
    clock: str = "wall"
    """`"wall"`, or `"cpu"`: the process's own time, which others on the machine lengthen less."""
    overrides: tuple[str, ...] = ()

    @property
    def least_seconds(self) -> float:
        """How long a sample must take."""
        return QUICK_SECONDS if self.quick else LEAST_SECONDS

    def settings(self, **defaults: str) -> dict[str, str]:
        """A benchmark's own settings: `defaults`, and what `--set key=value` says instead.

        Raises:
            ValueError: a key that has no default; names those that have one.
        """
        chosen = dict(defaults)
        for override in self.overrides:
            key, _, value = override.partition("=")
            if key not in defaults:
                raise ValueError(f"unknown setting {key!r}; allowed: {', '.join(defaults)}")
            chosen[key] = value
        return chosen


class Job(NamedTuple):
    """One step of a benchmark: a title for the progress bar, and what returns its rows."""

    title: str
    run: Callable[[], list[Row]]


class Benchmark(NamedTuple):
    """A name, one line about it, its jobs, and the columns of the table at the end."""

    name: str
    about: str
    jobs: Callable[[Options], list[Job]]
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """Two callables to compare; `theirs` is torch's own way, or None where there is none."""

    ours: Callable[[], object]
    theirs: Callable[[], object] | None
    gate: Callable[[], None]
    """Raises `GateError` if `ours` computes something wrong."""
    elements: int
    nbytes: int = 0
    """Bytes that `ours` must read and write; 0: not bound by memory."""
    copied: int = 0
    """Bytes of the tensor whose copy is timed beside it."""
    metered: bool = True
    """False where `ours` compiles itself and cannot run under the meter of its memory."""
    labels: Row = field(default_factory=dict)
    """Columns known only once it is built."""


def require(truth: bool | Tensor, what: str) -> None:
    """Raise `GateError` unless true."""
    if not bool(truth):
        raise GateError(what)


def timed(title: str, labels: Row, build: Callable[[], Trial], options: Options) -> Job:
    """A job that builds a trial, passes its gate, times it and measures its memory."""

    def run() -> list[Row]:
        trial = build()
        trial.gate()
        return [{**labels, **trial.labels, **measure(trial, options)}]

    return Job(title, run)


def measure(trial: Trial, options: Options) -> Row:
    """Time a trial's sides in rounds; milliseconds a call, ratios a round, bytes of memory."""
    sides: dict[str, Callable[[], object]] = {"ours": trial.ours}
    if trial.theirs:
        sides["theirs"] = trial.theirs
    if trial.copied:
        source = torch.ones(trial.copied, dtype=torch.uint8, device=options.device)
        target = torch.zeros_like(source)
        sides["copy"] = lambda: target.copy_(source)
    repeats = {name: calibrate(call, options) for name, call in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, call in sides.items():
            times[name].append(seconds(call, repeats[name], options.device, options.clock))
    row: Row = {"elements": trial.elements, "rounds": options.rounds}
    for name in ("ours", "theirs", "copy"):
        row |= quantiles(f"{name}_ms", [1e3 * t for t in times.get(name, [])])
    row |= quantiles("ratio", _each(times["ours"], times.get("theirs", [])))
    row["ns_per_element"] = 1e9 * statistics.median(times["ours"]) / max(trial.elements, 1)
    row["bytes_moved"] = trial.nbytes or ""
    # A copy reads and writes its bytes; both sides of each round see the same machine.
    speeds = [
        100 * (trial.nbytes / ours) / (2 * trial.copied / copy)
        for ours, copy in zip(times["ours"], times.get("copy", []), strict=False)
    ]
    row["percent_of_copy"] = statistics.median(speeds) if speeds and trial.nbytes else ""
    row["ours_peak_bytes"] = peak(trial.ours, options.device) if trial.metered else ""
    row["theirs_peak_bytes"] = peak(trial.theirs, options.device) if trial.theirs else ""
    return row


def calibrate(call: Callable[[], object], options: Options) -> int:
    """How often to call in one sample (it also warms up: compilers, caches, allocators)."""
    seconds(call, 1, options.device)
    once = seconds(call, 1, options.device, options.clock)
    return max(1, min(10_000, round(options.least_seconds / max(once, 1e-9))))


def seconds(call: Callable[[], object], repeats: int, device: str, clock: str = "wall") -> float:
    """Seconds of one call, from `repeats` of them."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    synchronize(device)
    start = now()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (now() - start) / repeats


def synchronize(device: str) -> None:
    """Wait for the device, where there is something to wait for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak(call: Callable[[], object], device: str) -> int:
    """The most bytes that one call holds besides what was alive before."""
    if device.startswith("cuda"):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    with LiveStorages() as live:
        call()
    return live.peak_nbytes


def quantiles(name: str, values: Sequence[float]) -> Row:
    """Columns `<name>_p10`, `_p50`, `_p90` (linear between values); empty without values."""
    if not values:
        return {f"{name}_p{percent}": "" for percent in (10, 50, 90)}
    at = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    )
    return {f"{name}_p{percent}": q for percent, q in zip((10, 50, 90), at.tolist(), strict=True)}


def _each(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=False)]


def environment(options: Options) -> Row:
    """Where and with what a row was measured."""
    cuda = options.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "memtrain": memtrain.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a CSV file; old rows stay, with empty cells in columns that they lack."""
    every = [*_rows_of(path), *rows]
    columns = list(dict.fromkeys(name for row in every for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({key: _rounded(value) for key, value in row.items()} for row in every)
    part.replace(path)  # a run that is broken off leaves the old file


def _rows_of(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _rounded(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value
