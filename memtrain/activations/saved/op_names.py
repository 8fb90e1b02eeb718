"""The op that an instruction calls, where its own source says so."""

import ast
import inspect
import linecache
from functools import lru_cache
from itertools import islice
from types import CodeType

_Place = tuple[int | None, int | None, int | None, int | None]
_OPERATOR = "an operator"


def calls(code: CodeType, instruction: int, op: str) -> bool:
    """Whether an instruction calls this op and no other, whenever it runs.

    It does as `torch.matmul(x, y)`, `x.matmul(y)` and `x @ y`. A variable or an attribute of `self`
    that is called may be another op the next time; so may a power, which is a square at times.

    Args:
        code: Of the frame that calls the op.
        instruction: Its `f_lasti`.
        op: The op's name, as in sites.

    Example:
        >>> import sys
        >>> calls(sys._getframe().f_code, 0, "matmul")  # without its source
        False
    """
    place = next(islice(code.co_positions(), instruction // 2, None))
    name = _called(code).get(place, "").strip("_")
    return name == op or (name == _OPERATOR and op not in ("pow", "square"))


@lru_cache(maxsize=1024)
def _called(code: CodeType) -> dict[_Place, str]:
    """The names of the ops that a function calls, by first and last line, and columns there."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        block = "".join(inspect.getblock(lines))
        # Columns are the file's own where the block stands as it does in its class.
        tree = ast.parse(("if True:" if block[:1].isspace() else "") + "\n" + block)
    except (SyntaxError, IndexError):
        return {}
    ast.increment_lineno(tree, code.co_firstlineno - 2)
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    found: dict[_Place, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.Call):
            name = _OPERATOR if isinstance(node, ast.BinOp) else _callee(node.func, local)
            found[node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] = name
    return found


def _callee(func: ast.expr, local: set[str]) -> str:
    if isinstance(func, ast.Name):
        return "" if func.id in local else func.id
    if not isinstance(func, ast.Attribute):
        return ""
    of_self = isinstance(func.value, ast.Name) and func.value.id == "self"
    return "" if of_self else func.attr
