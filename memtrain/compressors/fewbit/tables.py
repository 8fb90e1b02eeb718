"""Few-bit tables from outside: made of numbers, kept in files, known by name."""

from memtrain.compressors.fewbit.files import load_npz, save_npz
from memtrain.compressors.fewbit.step_function import Approximation, from_table

__all__ = ["TABLES", "from_table", "load_npz", "named_table", "register_table", "save_npz"]

TABLES: dict[str, Approximation] = {}


def register_table(name: str, table: Approximation, *, replace: bool = False) -> None:
    """Make a table known by a name, for `DerivativeCode(table_name=name)` and configs.

    Names live as long as the process: register before a config or a pickled plan is read.

    Args:
        name: Not empty.
        table: From `from_table`, `load_npz` or `solve`.
        replace: Whether a different table of that name may be replaced.

    Raises:
        ValueError: If the name is empty, or taken by another table.
        TypeError: If `table` is no Approximation.

    Example:
        >>> register_table("doctest", from_table([0.0], [0.0, 1.0]))
        >>> named_table("doctest").levels
        (0.0, 1.0)
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"table name {name!r} is not allowed; it must be a string with letters")
    if not isinstance(table, Approximation):
        raise TypeError(f"table is a {type(table).__name__}; allowed: Approximation")
    if not replace and TABLES.get(name, table) != table:
        raise ValueError(f"table name {name!r} is taken by another table; replace=True replaces it")
    TABLES[name] = table


def named_table(name: str) -> Approximation:
    """The table registered under `name`.

    Raises:
        ValueError: If this process does not know the name.

    Example:
        >>> named_table("nothing")
        Traceback (most recent call last):
        ValueError: table 'nothing' is not registered in this process...
    """
    if name not in TABLES:
        raise ValueError(
            f"table {name!r} is not registered in this process; call "
            f"memtrain.compressors.fewbit.tables.register_table first; registered: "
            f"{', '.join(TABLES) or 'none'}"
        )
    return TABLES[name]
