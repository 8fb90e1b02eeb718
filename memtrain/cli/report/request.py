"""The command line of `memtrain-report`: options, the model it asks for, and the plan."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from memtrain.cli.files import check_writable
from memtrain.cli.models.models import known_models
from memtrain.cli.parser import Parser
from memtrain.cli.report.group_by import BY
from memtrain.cli.report.request_fields import Request
from memtrain.config.sizes import UNITS, parse_size
from memtrain.config.sources import Config, load, nearest, options
from memtrain.training.settings import typed

FILES = ("json", "csv", "html", "png")
"""Options that write a file."""
PLANNER = ("allow", "max_error", "objective", "rates")
"""Keys that mean something with a budget."""
STDOUT = Path("-")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the options; keys of the form key=value stay as they are, in `overrides`.

    Args:
        argv: Without the program's name.

    Returns:
        The options.

    Raises:
        ValueError: For an option or a value that is not allowed.
        OSError: For a file that could not be written.

    Example:
        >>> parse(["model=gpt2", "--fail-over", "24GiB"]).fail_over
        25769803776
    """
    parser = Parser(prog="memtrain-report", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for name in FILES:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--by", choices=BY, default=BY[0])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--no-peak", dest="peak", action="store_false")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--fail-under", type=float)
    parser.add_argument("--fail-over")
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--paper-table", action="store_true")
    parser.add_argument("--measure-rates", type=Path)
    options = parser.parse_intermixed_args(argv)
    _check(options)
    for name, path in files(options):
        if path != STDOUT:
            check_writable(path, name)
    for name in ("plan", "measure_rates", "snapshot"):
        if (path := getattr(options, name)) is not None:
            check_writable(path, f"--{name.replace('_', '-')}")
    return options


def _check(options: argparse.Namespace) -> None:
    if options.paper_table:
        raise ValueError(
            "--paper-table is an experiment of memtrain's repository: "
            "python -m experiments paper_table there"
        )
    for name, least in (("top", 1), ("depth", 0)):
        if getattr(options, name) < least:
            value = getattr(options, name)
            raise ValueError(f"--{name} {value} is out of range; allowed: {least} or more")
    if options.snapshot is not None and not options.measure:
        raise ValueError("--snapshot is of a real step; allowed: with --measure")
    if options.fail_under is not None and not options.fail_under > 0:  # NaN is neither
        raise ValueError(f"--fail-under {options.fail_under} is out of range; allowed: above 0")
    if options.fail_over is not None:
        options.fail_over = parse_size(options.fail_over, "--fail-over")
    for name, path in files(options):
        if path == STDOUT and name not in ("--json", "--csv"):
            raise ValueError(f"{name} - is not allowed: {name} needs a file")
    printed = [path for _, path in files(options)].count(STDOUT)
    if printed + (printed and options.gradients) > 1:
        raise ValueError("- takes the standard output alone: without --gradients or another -")


def files(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The files to write: option and path."""
    for name in FILES:
        if (path := getattr(options, name)) is not None:
            yield f"--{name}", path


def requested(overrides: Sequence[str]) -> tuple[Request, Config]:
    """The report's own keys, and memtrain's.

    Args:
        overrides: key=value, each.

    Returns:
        What is asked for, checked.

    Raises:
        ValueError: For an unknown key or value; says which is nearest.
        TypeError: For a value of the wrong type.

    Example:
        >>> requested(["model=gpt2", "batch=8", "seed=3"])[1].seed
        3
    """
    own = {item.name for item in dataclasses.fields(Request)}
    theirs = {item.name for item in dataclasses.fields(Config)}
    for item in overrides:
        key, sign, _ = item.lstrip("+~").partition("=")
        if not sign:
            raise ValueError(_no_key(key))
        if key.split(".")[0] not in own | theirs:
            raise ValueError(f"unknown key {key!r}; {nearest(key, sorted(own | theirs))}")
    mine = [item for item in overrides if item.partition("=")[0].split(".")[0] in own]
    request = typed(Request, OmegaConf.from_dotlist(mine), "")  # type: ignore[arg-type]
    if not request.model:
        raise ValueError(f"model= is missing; allowed: {', '.join(known_models())}")
    keys = {item.partition("=")[0] for item in mine}
    if request.budget is None and (lone := [name for name in PLANNER if name in keys]):
        raise ValueError(f"{lone[0]}= is for a plan that fits; allowed: with budget=")
    rest = [item for item in overrides if item not in mine]
    if request.plan is not None and rest:
        raise ValueError(f"plan= takes the place of memtrain's keys; {rest[0]!r} is not for it")
    preset = [item for item in rest if item.startswith("preset=")]
    if preset and preset[-1].partition("=")[2] not in options("preset"):
        value = preset[-1].partition("=")[2]
        raise ValueError(f"unknown preset {value!r}; {nearest(value, options('preset'))}")
    return request, load(rest)


def _no_key(word: str) -> str:
    """What may be meant by a word without a key: a model, a preset, the unit of a size."""
    if word in UNITS:
        return f"no key=value: {word!r}; a size is one word: budget=8{word}"
    kinds = {"preset": options("preset"), "model": known_models()}
    meant = next((f"; did you mean {k}={word}?" for k, names in kinds.items() if word in names), "")
    return f"no key=value: {word!r}{meant or '; such as model=gpt2 batch=8'}"


def of_device(overrides: Sequence[str]) -> Request:
    """What `--measure-rates` is asked for: `device` and `dtype`.

    Args:
        overrides: key=value, each.

    Returns:
        The device and the dtype, checked.

    Raises:
        ValueError: For another key, or an unknown value.

    Example:
        >>> of_device(["device=cpu"]).device
        'cpu'
    """
    for item in overrides:
        if item.partition("=")[0] not in ("device", "dtype"):
            raise ValueError(f"--measure-rates takes device= and dtype=; {item!r} is not for it")
    return typed(Request, OmegaConf.from_dotlist([*overrides]), "")  # type: ignore[arg-type]


def settings(request: Request, overrides: Sequence[str], batch: Any) -> dict[str, Any]:
    """What the report is made for, as shown and as written.

    Args:
        request: The model and its batch.
        overrides: As given.
        batch: What the model is called with: its sizes stand for those that were left open.

    Returns:
        Key -> value; what was left open and has no size is missing.
    """
    own = dataclasses.asdict(request)
    names = tuple(own)
    if isinstance(batch, dict):
        for name, tensor in (("seq", "input_ids"), ("image", "pixel_values")):
            own[name] = batch[tensor].shape[-1] if tensor in batch else own[name]
    if request.budget is None:
        own = {name: value for name, value in own.items() if name not in PLANNER}
    own = {name: value for name, value in own.items() if value is not None}
    rest = [item for item in overrides if item.partition("=")[0] not in names]
    preset = [item.partition("=")[2] for item in rest if item.startswith("preset=")]
    if not preset and request.budget is None and request.plan is None:
        preset = ["balanced"]  # what `load` takes by itself
    others = [item for item in rest if not item.startswith("preset=")]
    return {**own, **({"preset": preset[-1]} if preset else {}), "overrides": others}
