"""Imports point downwards only (docs/design.md); the package's face is names only."""

import ast
import re
from pathlib import Path

import memtrain

ROOT = Path(memtrain.__file__).parent

# The house from the ground up: a room imports from the floors below its own, and from itself.
FLOORS = [
    ["kernels.cpu", "configs", "activations"],
    ["kernels"],
    ["kernels.packing", "kernels.random", "environment"],
    ["kernels.derivative", "kernels.floats", "kernels.group"],
    ["kernels.codebook", "kernels.norm", "kernels.patch"],
    ["kernels.step", "compressors.fewbit"],
    ["compressors"],
    ["activations.saved", "optim.states"],
    ["optim.fused"],
    ["optim.wrappers"],
    ["optim"],
    ["activations.ops"],
    ["activations.intercept"],
    ["activations.trace"],
    ["activations.adaptive"],
    ["precision"],
    ["config"],
    ["plan"],
    ["wrapped"],
    ["wrap_checks"],
    ["api"],
    ["verification"],
    ["audit.live_storages", "audit.live_tensors", "audit.join"],
    ["audit.allocations", "audit.process_memory"],
    ["audit.peak"],
    ["audit"],
    ["planner"],
    ["integrations"],
    ["training"],
    ["cli"],
    ["cli.models", "cli.render"],
    ["cli.report"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
}


def room_of(module):
    """The room of a module or of a name in one: the longest known beginning of its path."""
    parts = module.split(".")
    beginnings = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((room for room in beginnings if room in FLOOR), None)


def imports():
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] == "memtrain":
                    yield module, name.removeprefix("memtrain").removeprefix(".")


def test_private_api_of_the_compiler_is_in_one_module():
    private = re.compile(
        r"torch\._dynamo\.|_inductor\.|_functorch\._aot|_C\._dynamo|_torchdynamo|_orig_mod|_compiled_call"
    )
    found = [path.name for path in ROOT.rglob("*.py") if private.search(path.read_text())]
    assert found == ["compiler_internals.py"]


def test_imports_point_down():
    wrong = []
    for module, target in imports():
        # names of the public face, such as memtrain.wrap, are for whoever stands on top of it
        face = target in memtrain.__all__ or not target
        own, other = room_of(module), room_of(target)
        program = (own or "").split(".")[0] in ("training", "cli", "integrations")
        if module == "__init__" or (face and program) or own == other:
            continue
        if own is None or other is None or FLOOR[other] >= FLOOR[own]:
            wrong.append(f"{module} imports memtrain.{target}")
    assert wrong == []


def test_every_module_has_a_room():
    homeless = {module for module in MODULES if module != "__init__" and room_of(module) is None}
    assert homeless == set()
    assert {room for room in FLOOR if room not in MODULES} == set()
