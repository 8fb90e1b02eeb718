"""Instructions of a GPU for an element, from compiled kernels: `python -m benchmarks.machine_code`.

No GPU is needed: Triton carries ptxas and nvdisasm. A kernel is compiled as a launch would have it:
Triton specialises it on arguments that are multiples of 16 (addresses of torch's allocator are) and
on integers that are 1. Prints the table, and with `--write` keeps it; `before` stays what it was.
Instructions bound a kernel's speed only where they take longer than its bytes: an H100 reads or
writes 3.0e12 bytes and issues about 30e12 instructions of a lane a second.
"""

import csv
import importlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from memtrain.kernels.device_guard import for_amd

TABLE = Path(__file__).with_name("results") / "machine_code.csv"
ARCHITECTURE = 90
TRITON = "3.7"
"""Whose compiler the table is of."""
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
"""Launch options that may stand among a case's constants; they go to the compiler."""
SIZES = ("multiples", "odd", "ones")
"""Of integer arguments and addresses: multiples of 16; odd, and not aligned; 1, but aligned."""
_MEMORY = re.compile(r"LDG|STG|ATOMG|RED")


class Case(NamedTuple):
    """One row of the table: a case of `tests/kernels/aot_cases.py`."""

    module: str
    kernel: str
    wanted: Mapping[str, object]
    """Values that its types and constants must hold."""
    trips: int = 1
    """How often its loops go round."""


_ADAMW = {"RULE": 0, "STATES": 2}
_PLAIN = {**_ADAMW, "p_like": "*fp32", "MASTER": 0, "DRAWS": False}
_ROUNDED = {**_PLAIN, "DRAWS": True}
_DRAWN = {**_ADAMW, "p_like": "*bf16", "g_like": "*bf16", "MASTER": 1, "DRAWS": False}
_STEP, _SUMS = "step.step_triton", "step.reduce_triton"
_GROUP, _CODEBOOK = "group.group_triton", "codebook.quantize_triton"
_TILES = 16  # of a program of the first pass
CASES = {
    "AdamW": Case(_STEP, "_update_kernel", {**_PLAIN, "BITS": 32}),
    "AdamW, 4-bit blocks": Case(_STEP, "_update_kernel", {**_PLAIN, "BITS": 4, "SECOND": 0}),
    "AdamW, 4-bit blocks, bf16+sr": Case(
        _STEP, "_update_kernel", {**_DRAWN, "BITS": 4, "SECOND": 0}
    ),
    "AdamW, rank-1, pass 1": Case(
        _SUMS, "_reduce_kernel", {"SECOND": 1, "MASTER": 0, "p_like": "*fp32"}, _TILES
    ),
    "AdamW, rank-1, pass 2": Case(_STEP, "_update_kernel", {**_PLAIN, "BITS": 4, "SECOND": 1}),
    "AdamW, rank-1, stochastic, pass 2": Case(
        _STEP, "_update_kernel", {**_ROUNDED, "BITS": 4, "SECOND": 1}
    ),
    "AdamW, factored, pass 1": Case(
        _SUMS, "_reduce_kernel", {"SECOND": 2, "MASTER": 0, "p_like": "*fp32"}, _TILES
    ),
    "AdamW, factored, pass 2": Case(_STEP, "_update_kernel", {**_PLAIN, "BITS": 4, "SECOND": 2}),
    "AdamW, factored, stochastic, pass 2": Case(
        _STEP, "_update_kernel", {**_ROUNDED, "BITS": 4, "SECOND": 2}
    ),
    "AdamW, factored, 2 bits, pass 2": Case(
        "step.lloyd_max_triton", "_update_kernel", {"p_like": "*fp32", "MASTER": 0}
    ),
    "AdamW, 8-bit blocks": Case(_STEP, "_update_kernel", {**_PLAIN, "BITS": 8, "SECOND": 0}),
    "group, 4 bits, stochastic": Case(
        _GROUP, "_quantize_kernel", {"BITS": 4, "STOCHASTIC": True, "x_ptr": "*fp32"}
    ),
    "group, 4 bits, stochastic, bf16": Case(
        _GROUP, "_quantize_kernel", {"BITS": 4, "STOCHASTIC": True, "x_ptr": "*bf16"}
    ),
    "group, 4 bits, back": Case(_GROUP, "_dequantize_kernel", {"BITS": 4, "out_ptr": "*fp32"}),
    "block, 4 bits": Case(_CODEBOOK, "_quantize_kernel", {"BITS": 4, "SCALED": False}),
    "block, 4 bits, back": Case(_CODEBOOK, "_dequantize_kernel", {"BITS": 4, "SCALED": False}),
    "scaled, 4 bits": Case(_CODEBOOK, "_quantize_kernel", {"BITS": 4, "SCALED": True}),
    "scaled, 4 bits, back": Case(_CODEBOOK, "_dequantize_kernel", {"BITS": 4, "SCALED": True}),
}
"""The kernels of a step and of a saved activation, by the names of their rows."""


def elements(kernel: str, constants: Mapping[str, Any]) -> int:
    """Elements of a program."""
    if kernel == "_update_kernel":
        return constants["COUNT"] * 2 * constants["HALF"]
    if kernel == "_reduce_kernel":
        return 256 * 128
    # Both groups of a pair.
    rows = 2 if "ROWS" in constants and constants.get("STOCHASTIC") else 1
    return rows * constants["GROUPS"] * constants["WIDTH"] * 8


def cases_of(module: str) -> list[Any]:
    """The kernels, signatures and constants that a module of `memtrain.kernels` is compiled for."""
    return importlib.import_module("tests.kernels.aot_cases").CASES[module]


def find(case: Case) -> int:
    """The place of a case among its module's: the first that has all that it wants."""
    for place, (kernel, signature, constants) in enumerate(cases_of(case.module)):
        given = {**signature, **constants}
        if kernel.fn.__name__ == case.kernel and case.wanted.items() <= given.items():
            return place
    raise LookupError(f"no AOT case of {case.module} is {case}")


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    architecture: int | str = ARCHITECTURE,
    sizes: str = "multiples",
    one: str | None = None,
) -> Mapping[str, Any]:
    """PTX and machine code (`ptx`, `cubin`; AMD's: `amdgcn`) of a kernel as a launch compiles it.

    Args:
        kernel: A `@triton.jit` function.
        signature: Types of its arguments by name.
        constants: Its constants, and launch options.
        architecture: Compute capability times 10; of AMD's cards their name, such as `"gfx1100"`.
        sizes: One of `SIZES`.
        one: Name of an integer argument that is 1, whatever `sizes`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: value for key, value in constants.items() if key in OPTIONS}
    values = {key: value for key, value in constants.items() if key not in OPTIONS}
    unknown = (signature.keys() | values.keys()) ^ set(kernel.arg_names)
    if unknown:
        raise ValueError(f"arguments missing or not the kernel's: {sorted(unknown)}")
    types, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name, kind = parameter.name, signature.get(parameter.name, "constexpr")
        address, whole = kind.startswith("*"), kind in ("i32", "i64")
        if (address or whole) and not parameter.do_not_specialize:
            if whole and (sizes == "ones" or name == one):
                kind, values[name] = "constexpr", 1
            elif sizes == "multiples" or (address and sizes == "ones"):
                attributes[place,] = [["tt.divisibility", 16]]
        types[name] = kind
    source = ASTSource(kernel, types, values, attributes)
    if isinstance(architecture, str):
        lanes = 64 if architecture.startswith("gfx9") else 32
        target, options = GPUTarget("hip", architecture, lanes), for_amd(options, lanes)
    else:
        target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=options).asm


def _tool(name: str, *arguments: str, cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not tool.exists():
        raise FileNotFoundError(f"this triton carries no {name}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local (spilled) bytes, as cuobjdump reports them."""
    text = _tool("cuobjdump", "-res-usage", cubin=cubin)
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    if found.keys() != {"REG", "STACK", "LOCAL"}:
        raise ValueError(f"cuobjdump said: {text!r}")
    return {key: int(value) for key, value in found.items()}


def _read(cubin: bytes) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """Condition, opcode and operands of each instruction; where each jump goes, by its place."""
    codes, places, jumps = [], {}, []
    for line in _tool("nvdisasm", "-c", cubin=cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(codes)
        elif code := re.match(
            r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)", line
        ):
            if target := re.search(r"`\((\.L_x_\d+)\)", code[3]):
                jumps.append((len(codes), target[1]))
            codes.append(code.groups(""))
    return codes, {start: places[target] for start, target in jumps}


def instructions(cubin: bytes, trips: int = 1) -> Counter[str]:
    """How often a thread executes each opcode where every condition is true.

    Of an `if` with an `else` the shorter side counts: the longer one is what seldom happens (blocks
    whose scale is below 2**-90, in a step). A short side may stand before a jump over the other, in
    instructions under the jump's condition.

    Args:
        cubin: Machine code of one kernel.
        trips: How often each loop (a branch backwards) goes round.
    """
    codes, ends = _read(cubin)
    weights = [1] * len(codes)
    last = len(codes)
    for start, to in ends.items():
        if to == start:  # the program ends in a jump to itself
            last = min(last, start)
        elif to < start:
            weights[to : start + 1] = [trips * weight for weight in weights[to : start + 1]]
        else:
            one, other = [*range(start + 1, to)], _under(codes, start)
            if ends.get(to - 1, 0) > to:  # the first side ends in a jump over the second
                other = [*range(to, ends[to - 1])]
            for place in max(one, other, key=len) if other else ():
                weights[place] = 0
    found: Counter[str] = Counter()
    for (_, opcode, _), weight in list(zip(codes, weights, strict=True))[:last]:
        found[opcode] += weight
    return found


def _under(codes: list[tuple[str, ...]], jump: int) -> list[int]:
    """Places before a jump of instructions under its condition, since that was found."""
    condition, found = codes[jump][0], []
    for place in range(jump - 1, -1, -1):
        given, opcode, operands = codes[place]
        if not condition or opcode == "BRA" or re.search(rf"\b{condition.lstrip('!')}\b", operands):
            break
        if given == condition:
            found.append(place)
    return found


def wide(ptx: str) -> dict[str, bool]:
    """Whether some loads, and some stores, take several elements of 4 bytes at once."""
    return {
        "loads": bool(re.search(r"ld\.global\S*\.v[248]", ptx)),
        "stores": bool(re.search(r"st\.global\S*\.v[248]", ptx)),
    }


def measure(name: str, cubin: bytes, constants: Mapping[str, Any]) -> dict[str, float]:
    """Instructions, and loads and stores among them, for an element; registers of a thread."""
    case = CASES[name]
    threads = 32 * constants.get("num_warps", 4)
    each = elements(case.kernel, constants) / threads
    found = instructions(cubin, case.trips)
    memory = sum(count for opcode, count in found.items() if _MEMORY.match(opcode))
    return {
        "instructions": round(found.total() / each, 1),
        "memory": round(memory / each, 2),
        "registers": resources(cubin)["REG"],
    }


def read() -> dict[str, dict[str, float]]:
    """The committed table, by the names of its rows."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    return {row.pop("case"): {key: float(x) for key, x in row.items()} for row in rows}


def main(arguments: list[str]) -> None:
    known = read() if TABLE.exists() else {}
    rows = []
    for name, case in CASES.items():
        kernel, signature, constants = cases_of(case.module)[find(case)]
        found = measure(name, compiled(kernel, signature, constants)["cubin"], constants)
        old = known.get(name, {"before": found["instructions"], "memory_before": found["memory"]})
        before = {key: old[key] for key in ("before", "memory_before")}
        rows.append({"case": name, **before, **found})
        sys.stdout.write(f"{rows[-1]}\n")
    if "--write" in arguments:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
