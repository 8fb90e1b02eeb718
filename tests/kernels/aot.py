"""Compiles every Triton kernel for sm_80 and sm_90 without a GPU and reads its resources.

A script: it must run without TRITON_INTERPRET, which conftest.py sets for the tests' process.
Of a kernel's cases it takes as many as show each type and each constant of each argument, or all
with `--all`. Prints one JSON line per compiled case and architecture, and one per fault; exits 1 on
a fault.
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS = Path(__file__).parents[2] / "memtrain" / "kernels"
ARCHITECTURES = (80, 90)
# Launch options may stand among a case's constants; they go to the compiler.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


def modules(folder=KERNELS):
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*_triton.py"))
    return sorted(".".join(path.parts) for path in found)


def load(name):
    """A module of memtrain.kernels by name, or any file by its path."""
    if not name.endswith(".py"):
        return importlib.import_module(f"memtrain.kernels.{name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jit_functions(module):
    """The module's own @triton.jit functions by name."""
    return {
        value.fn.__name__: value
        for value in vars(module).values()  # an alias is no other kernel
        if isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
    }


def called(function):
    """Names that a @triton.jit function calls: those are device functions, not kernels."""
    tree = ast.parse(inspect.getsource(function.fn))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {f.id if isinstance(f, ast.Name) else getattr(f, "attr", None) for f in calls}


def coverage_faults(loaded):
    """What AOT_CASES leave out, as rows; a kernel is what no other kernel calls."""
    functions = {name: jit_functions(module) for name, module in loaded.items()}
    helpers = {
        callee for group in functions.values() for f in group.values() for callee in called(f)
    }
    faults = []
    for name, module in loaded.items():
        if not getattr(module, "AOT_CASES", None):
            faults.append({"module": name, "fault": "has no AOT_CASES"})
            continue
        covered = {case[0].fn.__name__ for case in module.AOT_CASES}
        kernels = set(functions[name]) - helpers
        faults += [
            {"module": name, "kernel": kernel, "fault": "is in no AOT case"}
            for kernel in sorted(kernels - covered)
        ]
    return faults


def cuobjdump():
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise FileNotFoundError(f"this triton carries no {tool.name}")
    return tool


def compile_case(kernel, signature, constants, architecture):
    """The cubin of one case."""
    options = {key: value for key, value in constants.items() if key in OPTIONS}
    values = {key: value for key, value in constants.items() if key not in OPTIONS}
    unknown = (signature.keys() | values.keys()) ^ set(kernel.arg_names)
    if unknown:
        raise ValueError(f"arguments missing or not the kernel's: {sorted(unknown)}")
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, types, values)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options).asm["cubin"]


def resources(cubin):
    """Registers, stack and local (spilled) bytes, as cuobjdump tells them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [cuobjdump(), "-res-usage", path]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    if found.keys() != {"REG", "STACK", "LOCAL"}:
        raise ValueError(f"cuobjdump said: {text!r}")
    return {key: int(value) for key, value in found.items()}


def telling(cases):
    """(place, architecture) of cases that show each type and constant of each kernel's arguments.

    A kernel's first is for both architectures, each other for one of them.
    """
    left = {
        place: {(kernel, *pair) for pair in (signature | constants).items()}
        for place, (kernel, signature, constants) in enumerate(cases)
    }
    shown, kernels, jobs = set(), set(), []
    while any(values - shown for values in left.values()):
        place = max(left, key=lambda at: len(left[at] - shown))
        shown |= left.pop(place)
        kernel = cases[place][0]
        both = kernel not in kernels
        kernels.add(kernel)
        jobs += [(place, sm) for sm in ARCHITECTURES if both or sm == ARCHITECTURES[len(jobs) % 2]]
    return jobs


def every(cases):
    return [(place, sm) for place in range(len(cases)) for sm in ARCHITECTURES]


def examine(job):
    """One row: module, case, architecture, resources, and the fault if there is one."""
    name, index, architecture = job
    kernel, signature, constants = load(name).AOT_CASES[index]
    row = {"module": name, "case": index, "kernel": kernel.fn.__name__, "sm": architecture}
    try:
        row |= resources(compile_case(kernel, signature, constants, architecture))
    except Exception as error:  # noqa: BLE001 (this case's fault; the others still run)
        return row | {"fault": f"{type(error).__name__}: {error}"}
    if row["STACK"] or row["LOCAL"]:
        row["fault"] = "uses a stack or spills registers"
    return row


def main(names, choose=telling):
    loaded, rows = {}, []
    for name in names:
        try:
            loaded[name] = load(name)
        except Exception as error:  # noqa: BLE001 (this module's fault; the others still run)
            rows.append({"module": name, "fault": f"{type(error).__name__}: {error}"})
    rows += coverage_faults(loaded)
    jobs = [
        (name, *job)
        for name, module in loaded.items()
        for job in choose(getattr(module, "AOT_CASES", ()))
    ]
    workers = min(len(os.sched_getaffinity(0)), 8)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows += pool.map(examine, jobs, chunksize=2)
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
    return any("fault" in row for row in rows)


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--all"]
    sys.exit(main(names or modules(), every if "--all" in sys.argv else telling))
