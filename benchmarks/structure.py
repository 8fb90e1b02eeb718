"""Figures of the code's structure: `python -m benchmarks.structure [FOLDER OF memtrain ...]`.

With folders of two checkouts (`python -m benchmarks.structure ../before/memtrain memtrain`) their
figures stand side by side. Nothing is imported from them: the figures are read from the source.
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

SOURCES = (".py", ".cpp", ".h", ".yaml")
Trees = Mapping[str, ast.Module]


def parse(root: Path) -> Trees:
    """Every module of a package by its dotted path below it (`""`: the package itself)."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        name = name.removesuffix("__init__").rstrip(".")
        found[name] = ast.parse(path.read_text())
    return found


def imports(trees: Trees, package: str, *, lazy: bool) -> dict[str, set[str]]:
    """Module -> the package's modules that it imports; those in functions only if `lazy`."""
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        inner = {
            id(node)
            for outer in ast.walk(tree)
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(outer)
        }
        for node in ast.walk(tree):
            if not lazy and id(node) in inner:
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                below = ".".join((node.module or "").split(".")[1:])
                for alias in node.names:
                    whole = f"{below}.{alias.name}".lstrip(".")
                    found[name].add(whole if whole in trees else below)
        found[name].discard(name)
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (strongly connected, of two modules or more)."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        reached[start] = seen
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in graph
        if name in reached[name]
    }
    return [sorted(group) for group in groups if len(group) > 1]


def definitions(trees: Trees, kind: type | tuple[type, ...]) -> Iterator[ast.AST]:
    for tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, kind))


def concrete_tests(trees: Trees) -> int:
    """`isinstance` tests on concrete compressors outside of compressors/."""
    inside = {n: t for n, t in trees.items() if n.split(".")[0] == "compressors"}
    names = {
        node.name
        for node in definitions(inside, ast.ClassDef)
        if any(isinstance(part, ast.FunctionDef) and part.name == "compress" for part in node.body)  # pyright: ignore
    } - {"Compressor"}
    count = 0
    for module, tree in trees.items():
        if module in inside:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                tested = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                count += bool(tested & names)
    return count


def figures(root: Path) -> dict[str, str]:
    """The figures of one package.

    Args:
        root: Its folder.

    Returns:
        What is counted -> how many, and of recurring names which.
    """
    trees = parse(root)
    lines = Counter[str]()
    for path in root.rglob("*"):
        if path.suffix in SOURCES:
            lines[path.suffix] += len(path.read_text().splitlines())
    classes = [node.name for node in definitions(trees, ast.ClassDef)]  # pyright: ignore
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1  # pyright: ignore
        for node in definitions(trees, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    what = sum(
        (ast.get_docstring(node) or "").startswith("What ")  # pyright: ignore
        for node in definitions(trees, documented)
    )
    eager, every = (imports(trees, root.name, lazy=lazy) for lazy in (False, True))
    importers = Counter(target for targets in every.values() for target in targets)
    modules = [name for name in trees if not (root / name.replace(".", "/")).is_dir()]
    return {
        "lines": f"{sum(lines.values()):,}",
        "lines by kind": ", ".join(f"{kind[1:]} {n:,}" for kind, n in sorted(lines.items())),
        "modules": str(len(modules)),
        "modules in the root": str(sum("." not in name for name in modules)),
        "classes": str(len(classes)),
        "class names defined more than once": _recurring(classes),
        "module names in more than one package": _recurring(
            name.rsplit(".", 1)[-1] for name in modules
        ),
        "modules with one importer": str(sum(importers[name] == 1 for name in modules)),
        "import circles": str(len(circles(eager))),
        "import circles, imports in functions counted": str(len(circles(every))),
        "isinstance tests on concrete compressors outside": str(concrete_tests(trees)),
        "docstrings that begin with What": str(what),
        "median lines of a function": f"{statistics.median(functions):g}",
        "median lines of a module": f"{statistics.median(map(_length, trees.values())):g}",
    }


def _length(tree: ast.Module) -> int:
    return max((getattr(node, "end_lineno", 0) for node in ast.walk(tree)), default=0)


def _recurring(names: Iterator[str] | list[str]) -> str:
    often = sorted(name for name, n in Counter(names).items() if n > 1)
    return f"{len(often)}" + (f": {', '.join(often)}" if often else "")


def main(folders: list[str]) -> None:
    roots = [Path(folder) for folder in folders or ["memtrain"]]
    found = [figures(root) for root in roots]
    table = Table("figure", *map(str, roots), show_lines=True)
    for name in found[0]:
        table.add_row(name, *(column[name] for column in found))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
