"""User-defined functions, named in a config: `py:<module>:<function>`."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def user_function(where: str, key: str = "model") -> Callable[..., Any]:
    """Import a function that `model=py:` or `data=py:` names.

    Example:
        >>> user_function("math:floor")(2.5)
        2
    """
    module, _, name = where.partition(":")
    if not name:
        raise ValueError(f"{key}='py:{where}' names no function; allowed: py:<module>:<function>")
    if "" not in sys.path:  # a console script does not search the working directory
        sys.path.insert(0, "")
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ValueError(f"{key}='py:{where}': {module} has no function {name!r}")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # the user's code may raise anything
            why = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(f"{key}='py:{where}' raised {type(error).__name__}: {why}") from error

    return called
