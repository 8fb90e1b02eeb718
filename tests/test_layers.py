"""Imports point downwards only (docs/design.md); the package's face is names only."""

import ast
from pathlib import Path

import memtrain

ROOT = Path(memtrain.__file__).parent

# What each part may import of memtrain, besides itself.
ALLOWED = {
    "kernels": set(),
    "compressors": {"kernels"},
    "meter": set(),
    "held": {"meter"},
    "report": {"peak"},
    "peak": {"api", "activations", "held", "kernels", "meter", "optim", "parameters"},
    "sizes": set(),
    "entry": {"activations"},
    "activations": {"kernels", "compressors"},
    "optim": {"kernels", "compressors"},
    "precision": {"kernels", "compressors", "activations"},
    "explain": set(),
    "schema": {"explain", "precision"},
    "config": {"configs", "explain", "schema"},
    "configs": set(),
    "states": {"entry", "compressors", "optim"},
    "build": {"config", "compressors"},
    "parameters": {"entry", "optim"},
    "planfile": {"build", "config", "compressors"},
    "rules": {"build", "config", "compressors", "activations"},
    "plan": {
        "build",
        "planfile",
        "rules",
        "config",
        "entry",
        "states",
        "parameters",
        "compressors",
        "activations",
        "optim",
        "precision",
    },
    "audit": {
        "plan",
        "rules",
        "peak",
        "report",
        "config",
        "entry",
        "compressors",
        "activations",
        "optim",
    },
    "api": {
        "plan",
        "rules",
        "config",
        "parameters",
        "compressors",
        "activations",
        "optim",
        "precision",
        "wrapped",
    },
    "wrapped": {"plan", "parameters", "activations", "precision"},
    "planner": {
        "activations",
        "compressors",
        "config",
        "entry",
        "optim",
        "peak",
        "plan",
        "planfile",
        "quality",
        "rules",
        "sizes",
        "states",
    },
    "experiments": {
        "",
        "peak",
        "planner",
        "sizes",
        "api",
        "activations",
        "compressors",
        "plan",
        "config",
        "held",
        "meter",
        "optim",
    },
    "quality": {"api", "plan", "activations"},
    "cli": {
        "",
        "api",
        "plan",
        "audit",
        "config",
        "meter",
        "experiments",
        "activations",
        "compressors",
        "quality",
        "sizes",
        "held",
        "peak",
        "planner",
        "planfile",
        "report",
    },
}


def imports():
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "memtrain":
                    names = [f"memtrain.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] == "memtrain":
                    yield path.relative_to(ROOT), part, [*name.split("."), ""][1]


def test_imports_point_down():
    wrong = [
        f"{path} imports memtrain.{target}"
        for path, part, target in imports()
        if part != "__init__"
        and target != part
        and target not in ALLOWED[part]
        # names of the public face, such as memtrain.wrap
        and not (target in memtrain.__all__ and "" in ALLOWED[part])
    ]
    assert wrong == []


def test_every_part_has_a_place():
    parts = {
        path.name.removesuffix(".py")
        for path in ROOT.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    assert parts - {"__init__", "__pycache__", "py.typed"} == set(ALLOWED)
