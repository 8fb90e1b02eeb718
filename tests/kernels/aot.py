"""Compiles every Triton kernel without a GPU, for sm_80 and sm_90, and reads its resources.

A script: it must run without TRITON_INTERPRET, which conftest.py sets for the tests' process.
Of a kernel's cases it takes those of the table of machine code, whose instructions it counts, and
the one with most branches, for integers of 1 and odd ones; or all with `--all`, and then for the
cards that people have at home too, where a stack is no fault. `--amd` compiles for AMD's cards as
many as show each type and each constant of each argument. Prints one JSON line per compiled case,
and one per fault; exits 1 on a fault.
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

if "--amd" in sys.argv:  # in the workers too, before kernels are imported
    torch.version.hip = "without a GPU"

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import machine_code
from tests.kernels import aot_cases

KERNELS = Path(__file__).parents[2] / "memtrain" / "kernels"
ARCHITECTURES = (80, 90)
CARDS = (75, 86, 89, 120)  # GeForce RTX 20 to 50; a T4 is 75
AMD = ("gfx942", "gfx1100")  # MI300 (64 lanes a warp), Radeon RX 7900 (32)


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


def cases(name):
    """The cases of a module, or of a file, which has its own."""
    return aot_cases.CASES.get(name) or getattr(load(name), "AOT_CASES", ())


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
    """What the cases leave out, as rows; a kernel is what no other kernel calls."""
    functions = {name: jit_functions(module) for name, module in loaded.items()}
    helpers = {
        callee for group in functions.values() for f in group.values() for callee in called(f)
    }
    faults = []
    for name in loaded:
        kernels = set(functions[name]) - helpers
        if not cases(name):
            if kernels or not functions[name]:
                faults.append({"module": name, "fault": "has no cases"})
            continue
        covered = {case[0].fn.__name__ for case in cases(name)}
        faults += [
            {"module": name, "kernel": kernel, "fault": "is in no AOT case"}
            for kernel in sorted(kernels - covered)
        ]
    return faults


def pinned(name):
    """Place among the cases -> row of the table of machine code, for a module's kernels."""
    rows = {row: case for row, case in machine_code.CASES.items() if case.module == name}
    return {machine_code.find(case): row for row, case in rows.items()}


def integers(case):
    """A case's arguments that a launch may specialise away."""
    kernel, signature, _ = case
    names = [p.name for p in kernel.params if not p.do_not_specialize]
    return [name for name in names if signature.get(name) in ("i32", "i64")]


def few(cases, first=()):
    """(place, architecture, sizes): those of `first`, and one for each kernel."""
    jobs, kernels = [(place, machine_code.ARCHITECTURE, "multiples") for place in first], {}
    for place, (kernel, _, _) in enumerate(cases):
        kernels.setdefault(kernel, set()).add(place)
    for places in kernels.values():
        branches = {at: sum(value is True for value in cases[at][2].values()) for at in places}
        richest = max(sorted(places), key=branches.__getitem__)
        sizes = ["ones", "odd"] if integers(cases[richest]) else ["multiples", "multiples"]
        if sizes[0] == "multiples" and not places.isdisjoint(first):  # one is compiled already
            sizes.pop()
        jobs += [(richest, sm, size) for sm, size in zip(ARCHITECTURES, sizes, strict=False)]
    return list(dict.fromkeys(jobs))


def distinct(cases):
    """Places of cases that show each type and constant of each kernel's arguments."""
    left = {
        place: {(kernel, *pair) for pair in (signature | constants).items()}
        for place, (kernel, signature, constants) in enumerate(cases)
    }
    shown, places = set(), []
    while any(values - shown for values in left.values()):
        places.append(max(left, key=lambda at: len(left[at] - shown)))
        shown |= left.pop(places[-1])
    return sorted(places)


def every(cases, first=()):
    """All of them, and only those that differ in integers equal to 1."""
    compiled_for = ARCHITECTURES + CARDS
    jobs = [(place, sm, "multiples") for place in range(len(cases)) for sm in compiled_for]
    jobs += [(place, 90, sizes) for place in range(len(cases)) for sizes in ("odd", "ones")]
    return jobs + [(place, 90, one) for place in distinct(cases) for one in integers(cases[place])]


def distinct_on_amd(cases, first=()):
    """Those of `distinct`, each for all of AMD's cards."""
    return [(place, card, "multiples") for place in distinct(cases) for card in AMD]


def examine(job):
    """One row: module, case, architecture, resources, and the fault if there is one."""
    name, index, architecture, sizes = job
    kernel, signature, constants = cases(name)[index]
    row = {"module": name, "case": index, "kernel": kernel.fn.__name__}
    row |= {"sm": architecture, "sizes": sizes}
    try:
        one = None if sizes in machine_code.SIZES else sizes
        kind = "odd" if one else sizes
        made = machine_code.compiled(kernel, signature, constants, architecture, kind, one)
        if architecture in AMD:
            counts = re.findall(r"\.[sv]gpr_spill_count: +(\d+)", made["amdgcn"])
            return row | {"spilled": sum(map(int, counts))}
        row |= machine_code.resources(made["cubin"])
        if (architecture, sizes) == (machine_code.ARCHITECTURE, "multiples"):
            reported = pinned(name).get(index)
            if reported is not None:
                row |= {"row": reported} | machine_code.measure(reported, made["cubin"], constants)
                row["wide"] = machine_code.wide(made["ptx"])
    except Exception as error:  # noqa: BLE001 (this case's fault; the others still run)
        return row | {"fault": f"{type(error).__name__}: {error}"}
    if architecture in ARCHITECTURES and (row["STACK"] or row["LOCAL"]):
        row["fault"] = "uses a stack or spills registers"
    return row


def main(names, choose=few):
    loaded, rows = {}, []
    for name in names:
        try:
            loaded[name] = load(name)
        except Exception as error:  # noqa: BLE001 (this module's fault; the others still run)
            rows.append({"module": name, "fault": f"{type(error).__name__}: {error}"})
    rows += coverage_faults(loaded)
    jobs = [(name, *job) for name in loaded for job in choose(cases(name), [*pinned(name)])]
    workers = min(len(os.sched_getaffinity(0)), 8)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows += pool.map(examine, jobs, chunksize=2)
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
    return any("fault" in row for row in rows)


if __name__ == "__main__":
    ways = {"--all": every, "--amd": distinct_on_amd}
    names = [argument for argument in sys.argv[1:] if argument not in ways]
    chosen = [ways[argument] for argument in sys.argv[1:] if argument in ways]
    sys.exit(main(names or modules(), *chosen))
