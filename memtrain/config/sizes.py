"""Parsing and formatting of sizes in bytes: `24GiB`, `24GB`, `1.50 GiB`."""

import re
from decimal import Decimal

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
"""Unit -> bytes."""

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", re.ASCII)
_ALLOWED = "a number and a unit (B, kB, MB, GB, TB of 1000; KiB, MiB, GiB, TiB of 1024): '24GiB'"


def parse_size(value: str | int, name: str = "size") -> int:
    """Return the bytes of a size. `24GB` is 24 billion bytes, `24GiB` is 24 * 2**30.

    Raises:
        ValueError: For another string or a negative number.
        TypeError: For another type.

    Example:
        >>> parse_size("24GB"), parse_size("24 GiB"), parse_size("1.5KiB"), parse_size(100)
        (24000000000, 25769803776, 1536, 100)
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r} is of type {kind}; allowed: {_ALLOWED}, or bytes")
    match = _NUMBER.fullmatch(str(value).strip())
    units = {unit.lower(): scale for unit, scale in UNITS.items()}
    if match is not None:
        number, unit = match.groups()
        if unit.lower() in units:
            return int(Decimal(number) * units[unit.lower()])
        if not unit and number.isdigit():
            return int(number)
    raise ValueError(f"{name}={str(value)!r} is not a size; allowed: {_ALLOWED}, or whole bytes")


def format_size(nbytes: int) -> str:
    """Format bytes in KiB, MiB or GiB with two decimals; differences may be negative.

    Example:
        >>> format_size(2**30 * 3 // 2), format_size(5 * 2**20), format_size(-100)
        ('1.50 GiB', '5.00 MiB', '-0.10 KiB')
    """
    for unit in ("GiB", "MiB"):
        if abs(nbytes) >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:,.2f} {unit}"
    return f"{nbytes / 2**10:.2f} KiB"
