"""Figures of the code's structure: `python -m benchmarks.structure [FOLDER OF memtrain ...]`.

With folders of two checkouts (`python -m benchmarks.structure ../before/memtrain memtrain`) their
figures stand side by side. Nothing is imported from them: the figures are read from the source.
Below them stand the ways of a saved tensor and of a parameter, in the memtrain that Python imports.
"""

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import memtrain
from memtrain import wrap

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


class Way(NamedTuple):
    """The functions of memtrain that are entered between the call of a hook and its return."""

    hook: str
    entered: list[tuple[str, str]]  # module and name; of what a function defines inside: its own

    def outside(self) -> list[tuple[str, str]]:
        """Those that are no part of the compressor, nor of its kernels."""
        inside = ("memtrain.compressors", "memtrain.kernels")
        return [place for place in self.entered if not place[0].startswith(inside)]

    def compresses(self) -> bool:
        """Whether a compressor was entered."""
        return any(module.startswith("memtrain.compressors") for module, _ in self.entered)


def ways(run: Callable[[], object], hook: str) -> list[Way]:
    """The ways through memtrain below each outermost call of a hook (`pack` or `unpack`)."""
    found: list[Way] = []
    top: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event == "return" and top and frame is top[0]:
            top.clear()
        if event != "call" or module.split(".")[0] != "memtrain":
            return
        name = frame.f_code.co_qualname.split(".<locals>")[0]
        if not top and frame.f_code.co_name == hook:
            top.append(frame)
            found.append(Way(hook, []))
        if top:
            found[-1].entered.append((module, name))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def saved_tensor_way() -> dict[str, str]:
    """The way of a saved tensor through memtrain: from the hook to its payload, and back.

    The tensor is the first input of an `nn.Linear` that is compressed under the preset `balanced`,
    in the third forward: the first one is recorded for the audit.

    Returns:
        For pack and unpack: distinct functions outside the compressor and its kernels (the
        places), and how often they were entered; the calls of Python functions, torch's own
        included, in a forward and its backward.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)]
    model = nn.Sequential(nn.ZeroPad2d((32, 0)), *layers)  # not the model's own input
    model, _ = wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    x = torch.randn(128, 32)
    for _ in range(2):
        model(x).square().mean().backward()
    found, outputs = {}, []
    forward = ways(lambda: outputs.append(model(x).square().mean()), "pack")
    backward = ways(lambda: outputs.pop().backward(), "unpack")
    for name, each in (("pack", forward), ("unpack", reversed(backward))):
        way = next(way for way in each if way.compresses()).outside()
        origin = sum(module.endswith("origin") for module, _ in way)
        found[f"saved tensor's way: places, {name}"] = str(len(set(way)))
        found[f"saved tensor's way: entries, {name}"] = f"{len(way)}, {origin} of origin"
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update((event,)))
    model(x).square().mean().backward()
    sys.setprofile(None)
    found["Python calls of a forward and a backward"] = str(calls["call"])
    return found


def optimizer_step_way() -> dict[str, str]:
    """The way of a parameter through memtrain: one `AdamW4bit.step()` of a model of one parameter.

    Returns:
        Distinct functions in which the parameter stands, or a tuple, list, set or dict that holds
        it; their variables under which it does; and these variables' distinct names.
    """
    root = str(Path(memtrain.__file__).parent)
    param = nn.Parameter(torch.randn(128, 64))
    optimizer = memtrain.optim.AdamW4bit([param])
    way: set[tuple[str, str]] = set()

    def holds(value: Any) -> bool:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        many = isinstance(inner, tuple | list | set)
        return value is param or (many and any(each is param for each in inner))

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(root):
            return None
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        way.update((place, name) for name, value in frame.f_locals.items() if holds(value))
        return look

    for traced in (False, True):  # the first step makes the states
        param.grad = torch.randn_like(param)
        before = sys.gettrace()
        sys.settrace(look if traced else before)
        try:
            optimizer.step()
        finally:
            sys.settrace(before)
    return {
        "parameter's way in AdamW4bit.step: functions": str(len({place for place, _ in way})),
        "parameter's way in AdamW4bit.step: variables": str(len(way)),
        "parameter's way in AdamW4bit.step: names": str(len({name for _, name in way})),
    }


def main(folders: list[str]) -> None:
    roots = [Path(folder) for folder in folders or ["memtrain"]]
    found = [figures(root) for root in roots]
    table = Table("figure", *map(str, roots), show_lines=True)
    for name in found[0]:
        table.add_row(name, *(column[name] for column in found))
    Console().print(table)
    way = Table("figure", "now")
    for row in (saved_tensor_way() | optimizer_step_way()).items():
        way.add_row(*row)
    Console().print(way)


if __name__ == "__main__":
    main(sys.argv[1:])
