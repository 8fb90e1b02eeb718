"""`python -m benchmarks list`, `python -m benchmarks run [name ...]`: see `--help`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import (
    activations,
    architectures,
    families,
    host,
    optimizer,
    peaks,
)
from benchmarks.harness import RESULTS, Benchmark, GateError, Options, Row, append, environment

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (activations, architectures, families, host, optimizer, peaks)
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what there is to run")
    run = commands.add_parser("run", help="run benchmarks, each row into <out>/<name>.csv")
    run.add_argument("names", nargs="*", metavar="name", help="all of them if none is given")
    run.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    run.add_argument("--quick", action="store_true", help="tiny sizes, 2 rounds: is it wired?")
    run.add_argument("--full", action="store_true", help="up to 2^28 elements")
    run.add_argument("--rounds", type=int, help="of each comparison (9; 2 if quick)")
    run.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="wall, or cpu: the process's time, for one thread on a busy machine",
    )
    run.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    run.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="a benchmark's own settings"
    )
    args = parser.parse_args(arguments)
    if args.command == "run":
        for name in args.names:
            if name not in BENCHMARKS:
                parser.error(f"unknown benchmark {name!r}; allowed: {', '.join(BENCHMARKS)}")
        if args.device != "cpu" and not torch.cuda.is_available():
            parser.error(f"--device {args.device}: there is no CUDA device here")
        if args.rounds is not None and args.rounds < 1:
            parser.error(f"--rounds {args.rounds}; allowed: 1 or more")
    return args


def run(benchmark: Benchmark, options: Options, out: Path, console: Console) -> list[str]:
    """Run one benchmark's jobs; return the gates that failed."""
    jobs, rows, failed = benchmark.jobs(options), [], []
    path = out / f"{benchmark.name}.csv"
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(benchmark.name, total=len(jobs))
        for job in jobs:
            progress.update(bar, description=f"{benchmark.name}: {job.title}")
            try:
                new = [{**row, **environment(options)} for row in job.run()]
            except GateError as error:
                failed.append(f"{benchmark.name}: {job.title}: {error}")
                continue
            finally:
                progress.advance(bar)
            append(path, new)  # at once: a run that is broken off keeps what it has
            rows += new
    console.print(table(benchmark, rows))
    console.print(f"{len(rows)} rows in {path}")
    return failed


def table(benchmark: Benchmark, rows: Sequence[Row]) -> Table:
    shown = Table(title=benchmark.about)
    for name in benchmark.shown:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*(_cell(row.get(name, "")) for name in benchmark.shown))
    return shown


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a gate failed."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)  # in a file, rows stay whole
    if args.command == "list":
        for benchmark in BENCHMARKS.values():
            console.print(f"{benchmark.name:18} {benchmark.about}")
        return 0
    rounds = args.rounds or (2 if args.quick else 9)
    options = Options(args.device, args.quick, args.full, rounds, args.clock, tuple(args.set))
    failed: list[str] = []
    for name in args.names or BENCHMARKS:
        failed += run(BENCHMARKS[name], options, args.out, console)
    for line in failed:
        console.print(f"GATE FAILED, not timed: {line}", style="bold red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
