"""Ten minutes on a GPU: one file to run, each step with its own limit of time.

    python3 benchmarks/gpu_session.py --bring site           # where packages can be had, if needed
    python3 benchmarks/gpu_session.py --site site --out out  # where the GPU is; nothing to install
    python3 benchmarks/gpu_session.py --tiny                 # all of it on a CPU, at tiny sizes

Each step is a process of its own, killed at its limit; each result is a line of
`<out>/gpu_session.jsonl` as soon as it is there, and what a step prints is in
`<out>/gpu_session.log`. A case that leaves the device faulted, or dies, ends its process; the cases
after it run in another. docs/gpu.md says what the lines should say. `--steps` takes some of the
steps, in the order given. `--tiny` runs every Triton kernel in the interpreter.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Pure Python that memtrain needs and a machine with torch may lack.
PACKAGES = (
    *("hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "antlr4-python3-runtime==4.9.3"),
    *("rich>=13", "markdown-it-py>=2.2", "mdurl>=0.1", "pygments>=2.13"),
)
FAULTED = 75  # exit status of a step's process whose device has faulted

Row = dict[str, Any]


LIMITS = {
    "environment": 60,
    "driver": 120,
    "kernel_tests": 240,
    "optimizer": 120,
    "gpt2": 120,
    "synchronisations": 120,
    "bandwidth": 150,
    "llama": 120,
    "gpt2_compiled": 240,
    "llama_compiled": 240,
    "sanitizer": 240,
}
"""Step of `gpu_steps.CASES` -> seconds that it may take, in the order of a session."""
SIDE_BY_SIDE = "driver"
"""The step whose cases have a process each, as many at once as there are cores.

A kernel's first launch compiles it, on one core, for all steps after this one.
"""


def emit(step: str, out: Path, row: Row) -> None:
    """Append a row, at once."""
    with out.open("a") as file:
        file.write(json.dumps({"step": step, **row}, default=str) + "\n")


def this(step: str, out: Path, first: int = 0, every: int = 1, *, tiny: bool = False) -> list[str]:
    """The command that runs, of a step's cases, the `first` and `every` so many after it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--step", step, "--out", str(out)]
    command += ["--cases", str(first), str(every)]
    return [*command, "--tiny"] if tiny else command


def run_step(name: str, out: Path, first: int, every: int, *, tiny: bool) -> None:
    """Run cases of a step, each row into `out` as it comes.

    After the first case that leaves the device faulted this process exits with `FAULTED`.
    """
    import torch

    from benchmarks.gpu_clocks import Scale, guarded
    from benchmarks.gpu_steps import CASES
    from memtrain.kernels.dispatch import backend

    scale = Scale("cuda" if torch.cuda.is_available() and not tiny else "cpu", tiny, out)
    if name == SIDE_BY_SIDE and every == 1 and not tiny:
        number = len([*CASES[name](scale)])
        commands = [this(name, out, place, number) for place in range(first, number)]
        for place, why in side_by_side(commands):
            emit(name, out, {"case": place, "error": why})
        return
    with backend("triton") if scale.device == "cpu" else nullcontext():
        for at, (label, find) in enumerate(CASES[name](scale)):
            if at < first or (at - first) % every:
                continue
            emit(name, out, {"case": at, **label, "begun": True})
            row = {"case": at, **guarded(label, find)}
            try:
                scale.clear()
            except RuntimeError as error:  # it may be the first word of the case's fault
                emit(name, out, {"error": f"faulted: {str(error)[:500]}", **row})
                sys.stdout.flush()
                os._exit(FAULTED)  # what Python and torch tear down could abort
            emit(name, out, row)


def side_by_side(
    commands: Sequence[Sequence[str]], seconds: float = 100
) -> Iterator[tuple[int, str]]:
    """Run commands, as many at once as there are cores; the place of each that failed, and why."""

    def run(command: Sequence[str]) -> str:
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:g} s"
        sys.stderr.write(ended.stderr)
        status = ended.returncode
        return f"exit status {status}: {ended.stderr[-1500:]}" if status else ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for place, why in enumerate(pool.map(run, commands)):
            if why:
                yield place, why


def launch(name: str, command: Sequence[str], limit: float, out: Path) -> str:
    """Run a command as a step, with its children killed at the limit; how it ended."""
    with out.with_suffix(".log").open("a") as log:
        print(f"== {name}", file=log, flush=True)
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:  # where the session is ended too: the step's processes would go on
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return {0: "ok", FAULTED: "faulted"}.get(status, f"failed: {status}")


def run_whole(name: str, out: Path, limit: float, *, tiny: bool) -> str:
    """Run a step, after a case that ends its process from the next one; how it ended."""
    end, first = time.monotonic() + limit, 0
    while True:
        ended = launch(name, this(name, out, first, tiny=tiny), end - time.monotonic(), out)
        done = {row["case"]: "begun" not in row for row in rows_of(name, out) if "case" in row}
        case = max(done, default=-1)  # the last of that process, if one has begun there
        if ended == "out of time" or case < first or (ended == "ok" and done[case]):
            return ended
        if ended != "faulted":  # which the case's row says
            emit(name, out, {"case": case, "error": f"its process ended: {ended}"})
        first = case + 1


def rows_of(name: str, out: Path) -> list[Row]:
    """The rows of a step that runs, or has just run."""
    rows = map(json.loads, out.read_text().splitlines() if out.exists() else ())
    own: list[Row] = []
    for row in rows:
        if row["step"] == name:
            own = [] if "ended" in row else [*own, row]
    return own


def session(names: Sequence[str], out: Path, seconds: float, *, tiny: bool) -> int:
    """Run steps one after the other; returns how many did not end well."""
    session_start, bad = time.monotonic(), 0
    for name in names:
        start = time.monotonic()
        left = seconds - (start - session_start)
        limit = min(left, LIMITS[name] * (4 if tiny else 1))  # the interpreter is slow
        ended = "not begun: the session's time is over"
        if left >= 5:
            ended = run_whole(name, out, limit, tiny=tiny)
        took = round(time.monotonic() - start, 1)
        errors = sum("error" in row or "failed" in row for row in rows_of(name, out))
        emit(name, out, {"ended": ended, "errors": errors, "seconds": took, "limit": limit})
        bad += ended != "ok" or errors > 0
        print(f"{name:18} {ended:14} {took:7.1f} s, {errors} errors", flush=True)
    return bad


def bring(folder: Path) -> int:
    """Put the pure-Python packages of `PACKAGES` into a folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(folder), *PACKAGES], check=False)
    for ignores in [*folder.rglob(".gitignore")]:  # by hydra's git would leave its parsers behind
        ignores.unlink()
    return done.returncode


def prepare(site: Path | None, *, tiny: bool) -> None:
    """Let this process and its children import memtrain, and run its kernels as they should."""
    paths = [str(ROOT), *([str(site.resolve())] if site else [])]
    sys.path[:0] = paths
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([old] if old else [])])
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRITON_INTERPRET" if tiny else "MEMTRAIN_GPU"] = "1"


def lacking(*, tiny: bool) -> str:
    """Name what every step needs and this machine lacks; empty where it lacks nothing."""
    for name in ("memtrain", "hydra.grammar.gen.OverrideLexer"):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - hydra without its parsers exits
            return f"{name} cannot be imported, {error!r}: see --bring and --site"
    import torch

    if tiny:
        return ""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; --tiny runs on a CPU"
    return no_launcher()


def no_launcher() -> str:
    """Why Triton could not compile what launches its kernels; empty where it could."""
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler to launch kernels: gcc or clang, or the one that CC names"
    headers = sysconfig.get_paths("posix_prefix")["include"]  # where Triton looks
    command = [compiler, "-fsyntax-only", "-I", headers, "-x", "c", "-"]
    done = subprocess.run(
        command, input="#include <Python.h>", capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"Triton needs Python.h, which is not in {headers}"


def main(given: Sequence[str] | None = None) -> int:
    """Exit status 1 if a step did not end well, 2 if none could."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bring", type=Path, metavar="FOLDER", help="download what it needs")
    parser.add_argument("--site", type=Path, help="a folder that --bring has made")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_session_out")))
    parser.add_argument("--steps", default=",".join(LIMITS), help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--seconds", type=float, default=570, help="of all steps together")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--step", choices=LIMITS, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs=2, type=int, default=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.out = args.out.resolve()  # steps change folder
    names = args.steps.split(",")
    unknown = [name for name in names if name not in LIMITS]
    if unknown:
        parser.error(f"unknown steps {', '.join(unknown)}; allowed: {', '.join(LIMITS)}")
    if args.bring:
        return bring(args.bring)
    prepare(args.site, tiny=args.tiny)
    if args.step:
        run_step(args.step, args.out, *args.cases, tiny=args.tiny)
        return 0
    if lacks := lacking(tiny=args.tiny):
        print(lacks, file=sys.stderr)
        return 2
    # So that `launch` ends the step that runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    left = args.seconds - (time.monotonic() - start)
    return min(1, session(names, args.out / "gpu_session.jsonl", left, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())
