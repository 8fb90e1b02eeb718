"""`memtrain-fewbit`: print the step function that approximates a derivative."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from memtrain.cli.command_line import Parser, consoles, discard_output

if TYPE_CHECKING:
    from memtrain.compressors.fewbit.step_function import Approximation

HELP = """\
usage: memtrain-fewbit FUNCTION [--bits N] [options]
       memtrain-fewbit --errors

Print the step function that approximates an activation's derivative in the
backward pass: its boundaries, its levels, the integral of its squared error.

examples:
  memtrain-fewbit gelu --bits 3
  memtrain-fewbit gelu --bits 2 --interval -6 6 --weight normal
  memtrain-fewbit elu --alpha 5
  memtrain-fewbit --errors                 errors of every function, 1 to 4 bits

functions (and their parameters):
{functions}
options:
  --bits N           1 to 8 (3); functions of two slopes take 1, exactly
  --interval LO HI   where the error counts; the training default if omitted
  --weight NAME      uniform (default), or normal: inputs near 0 count more
  --errors           print the table of errors

exit status: 0 done, 2 wrong arguments
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        argv: Arguments without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status.

    Example:
        >>> main(["gelo"])
        2
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    console, errors = consoles()
    try:
        if {"-h", "--help"} & set(argv) or not argv:
            console.out(_help(), end="", highlight=False)
            return 0
        arguments = _parse(argv)
        if arguments.errors:
            console.print(errors_table())
            return 0
        run(arguments, console)
    except BrokenPipeError:
        discard_output()
    except (ValueError, TypeError) as error:
        errors.print(f"memtrain-fewbit: {error}", markup=False)
        return 2
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    from memtrain.compressors.fewbit.functions import FAMILIES

    parser = Parser(prog="memtrain-fewbit", add_help=False, allow_abbrev=False)
    parser.add_argument("function", nargs="?")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--interval", type=float, nargs=2)
    parser.add_argument("--weight", default="uniform", choices=("uniform", "normal"))
    parser.add_argument("--errors", action="store_true")
    for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.defaults):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=f"parameter {name}", type=float)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.function is None and not arguments.errors:
        raise ValueError("no function given; see memtrain-fewbit --help")
    return arguments


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Solve the table and print it.

    Args:
        arguments: The parsed arguments.
        console: The output; 80 columns are enough.

    Raises:
        ValueError: For an argument that is not allowed.
    """
    from memtrain.compressors.fewbit.functions import FAMILIES, check_name, curve
    from memtrain.compressors.fewbit.solver import solve, table

    function, bits = arguments.function, arguments.bits
    check_name(function, FAMILIES)
    parameters = _parameters(arguments, FAMILIES[function].defaults)
    interval = FAMILIES[function].interval(*parameters)
    if arguments.interval:
        interval = arguments.interval[0], arguments.interval[1]
    if arguments.interval or arguments.weight != "uniform":
        step = solve(curve(function, parameters), bits, interval, arguments.weight)
    else:
        step = table(function, bits, parameters)
    names = dict(zip(FAMILIES[function].defaults, parameters, strict=True))
    _show(console, function, names, interval, arguments.weight, step)


def _parameters(arguments: argparse.Namespace, defaults: "Any") -> tuple[float, ...]:
    from memtrain.compressors.fewbit.functions import complete

    values_by_name = {
        name.removeprefix("parameter "): value
        for name, value in vars(arguments).items()
        if name.startswith("parameter ") and value is not None
    }
    for name in values_by_name:
        if name not in defaults:
            allowed = ", ".join(defaults) or "none"
            raise ValueError(f"{arguments.function} has no parameter {name!r}; it has: {allowed}")
    values = [values_by_name.get(name, default) for name, default in defaults.items()]
    if None in values:
        missing = [
            f"--{name.replace('_', '-')}"
            for name, v in zip(defaults, values, strict=True)
            if v is None
        ]
        raise ValueError(f"{arguments.function} needs {' and '.join(missing)}")
    return complete(arguments.function, values)


def _show(
    console: Console,
    function: str,
    parameters: dict[str, float],
    interval: tuple[float, float],
    weight: str,
    step: "Approximation",
) -> None:
    words = [function, *(f"{name}={value:g}" for name, value in parameters.items())]
    console.print(
        f"{' '.join(words)}: {step.bits} bit{'s' * (step.bits > 1)}, {step.parity}", highlight=False
    )
    count = f"on [{interval[0]:g}, {interval[1]:g}], weight {weight}"
    exact = "0: the steps are the derivative" if step.error == 0 else f"{step.error:.6g}"
    console.print(f"squared error {count}: {exact}\n", highlight=False)
    side = "|x|" if step.even else "x"
    rows = Table(box=None, pad_edge=False)
    for name in ("code", f"{side} above", f"{side} up to", "level"):
        rows.add_column(name, justify="right", no_wrap=True)
    for code, low, high in pieces(step):
        rows.add_row(str(code), f"{low:.7g}", f"{high:.7g}", f"{step.levels[code]:.7f}")
    console.print(rows)


def pieces(step: "Approximation") -> list[tuple[int, float, float]]:
    """Return the intervals of the step function, in order: code, left end, right end.

    Example:
        >>> from memtrain.compressors.fewbit.solver import table
        >>> pieces(table("hardshrink", 1, (2.0,)))
        [(0, 0.0, 2.0), (1, 2.0, inf)]
    """
    # -0 and what rounding leaves of 0 read as 0.
    inner = [0.0 if abs(x) < 1e-12 else x for x in step.boundaries]
    edges = [0.0 if step.even else -math.inf, *inner, math.inf]
    codes = [0, 1, 0] if step.parity == "band" else range(len(step.levels))
    return list(zip(codes, edges[:-1], edges[1:], strict=True))


def errors_table() -> Table:
    """Return squared errors of every function that needs no parameters, for 1 to 4 bits.

    Returns:
        A table of 80 columns or fewer. The exact functions are named below it.

    Example:
        >>> errors_table().row_count > 10
        True
    """
    from memtrain.compressors.fewbit.functions import CURVES
    from memtrain.compressors.fewbit.solver import table
    from memtrain.compressors.fewbit.step_function import EXACT

    rows = Table(box=None, pad_edge=False)
    rows.add_column("function")
    for bits in range(1, 5):
        rows.add_column(f"{bits} bit{'s' * (bits > 1)}", justify="right", no_wrap=True)
    for function in CURVES:
        if function not in EXACT:
            rows.add_row(function, *(f"{table(function, bits).error:.4f}" for bits in range(1, 5)))
    rows.caption = f"exact with 1 bit: {', '.join(EXACT)}"
    rows.caption_justify = "left"
    return rows


def _help() -> str:
    from memtrain.compressors.fewbit.functions import FAMILIES

    lines = []
    for name, family in FAMILIES.items():
        options = " ".join(f"--{option.replace('_', '-')}" for option in family.defaults)
        lines.append(f"  {name} {options}".rstrip())
    plain = [line.strip() for line in lines if "--" not in line]
    rest = "".join(f"{line}\n" for line in lines if "--" in line)
    half = len(plain) // 2
    return HELP.format(
        functions=f"  {', '.join(plain[:half])},\n  {', '.join(plain[half:])}\n{rest}"
    )


if __name__ == "__main__":
    sys.exit(main())
