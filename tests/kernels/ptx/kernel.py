"""Executes PTX without a GPU: all threads of a launch side by side, in NumPy.

Triton's interpreter runs a kernel's Python. What it cannot show is what the compiler makes of it:
PTX that a kernel holds, loads of 16 bytes from addresses that a launch says are aligned, layouts
converted through shared memory, products and sums that become one instruction. Addresses are the
process's own, so that tensors on the CPU stand for a device's.

Besides what a device does, a launch fails here where threads read or write outside of every tensor,
where not all threads of a program come to a barrier, and where a program touches what another one
of the launch writes. What is undefined has all bits set. Threads of one program go in step, so that
a barrier that lacks is not seen.

Reference: NVIDIA, Parallel Thread Execution ISA, version 8.7, chapter 9.7.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.arithmetic import BITS, DTYPES, Array
from tests.kernels.ptx.memory import Fault, Memory
from tests.kernels.ptx.program import Instruction, Program
from tests.kernels.ptx.registers import Mask, Read, Step, names_of
from tests.kernels.ptx.warps import WARP, Warps, is_whole

LANES = 2**15
"""Threads at most that run side by side: programs beyond wait for their turn."""

_HINTS = {"nc", "relaxed", "gpu", "volatile", "v2", "v4"}


class Kernel(Warps):
    """A kernel that can be launched, one launch after the other.

    Args:
        program: What it executes.
        shared: Bytes of shared memory of a program of a grid.
        seed: Moves what approximate instructions give, equally each time, by at most as many units
            in the last place as a device may be off; None: they are right to the last bit.
    """

    def __init__(self, program: Program, shared: int = 0, seed: int | None = None) -> None:
        super().__init__(program, shared)
        self.seed = seed
        self.arguments: dict[str, Array] = {}
        self.steps = [self._step(one) for one in program.code]

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[int | float], memory: Memory
    ) -> None:
        """Run all programs of a grid.

        Args:
            grid: Their number in each of three dimensions.
            arguments: Of each parameter, in order: addresses and numbers.
            memory: What may be touched.

        Raises:
            Fault: Where a device would refuse, or what it would do is undefined.
        """
        self.grid, self.memory = grid, memory
        for (name, kind), value in zip(self.program.parameters.items(), arguments, strict=True):
            dtype = DTYPES[kind]
            if dtype.kind != "f":  # of negative numbers the bits
                value = int(value) & (2 ** (8 * dtype.itemsize) - 1)
            self.arguments[name] = np.array([value], dtype).view(f"u{dtype.itemsize}")
        x, y, z = self.grid
        at_once = max(1, LANES // self.program.threads)
        with np.errstate(all="ignore"):
            for start in range(0, x * y * z, at_once):
                self._begin(np.arange(start, min(start + at_once, x * y * z)))
                groups = {0: self.alive.copy()}  # of threads, by the instruction that is next
                while groups:
                    # Those that are behind go first, so that all meet where their ways do.
                    at = min(groups)
                    mask = groups.pop(at)
                    for place, some in self._advance(at, mask, min(groups, default=-1)):
                        groups[place] = groups[place] | some if place in groups else some
        self.memory.check_programs()

    def _begin(self, programs: Array) -> None:
        threads = self.program.threads
        self.lanes = len(programs) * threads
        self.programs = np.repeat(programs, threads)
        self.local = np.repeat(np.arange(len(programs)), threads)
        self.alive = np.ones(self.lanes, bool)
        self.shared = np.full((len(programs), self.nshared), 255, np.uint8)
        self.registers.clear()
        x, y, _ = self.grid
        thread = np.tile(np.arange(threads, dtype=np.uint32), len(programs))
        places = self.programs % x, self.programs // x % y, self.programs // (x * y)
        self.special = {"%tid.x": thread, "%laneid": thread % np.uint32(WARP)}
        for axis, place, size in zip("xyz", places, self.grid, strict=True):
            self.special[f"%ctaid.{axis}"] = place.astype(np.uint32)
            self.special[f"%nctaid.{axis}"] = np.array([size], np.uint32)

    def _advance(self, at: int, mask: Array, stop: int) -> list[tuple[int, Array]]:
        """Run some threads until their ways part, or they come to others."""
        whole = bool((mask == self.alive).all())
        while at != stop:
            one = self.program.code[at]
            running = mask
            if one.guard is not None:
                running = mask & self._holds(one.guard)
            if one.name == "bra":
                target = self.program.labels[one.operands[0]]
                ways = [(target, running), (at + 1, mask & ~running)]
                return [(place, some) for place, some in ways if some.any()]
            if one.name in ("ret", "exit"):
                self.alive &= ~running
                mask = mask & ~running
                if not mask.any():
                    return []
            elif one.guard is None or running.any():
                everyone = whole and (one.guard is None or bool((running == mask).all()))
                self.steps[at](None if everyone else running)
            at += 1
        return [(at, mask)]

    # -- instructions -----------------------------------------------------------------------

    def _step(self, one: Instruction) -> Step:
        """What executes an instruction."""
        make = getattr(self, f"_{one.name}", self._function)
        return make(one)

    def _bra(self, one: Instruction) -> Step:
        return lambda active: None  # `_advance` sees to them

    _ret = _exit = _bra

    def _bar(self, one: Instruction) -> Step:
        def run(active: Mask) -> None:
            if active is not None and not is_whole(active, self.alive, self.program.threads):
                raise Fault(f"not all threads of a program come to it: {one.text}")

        return run

    def _mov(self, one: Instruction) -> Step:
        kind, (to, source) = one.modifiers[-1], one.operands
        if to.startswith("{"):
            return self._unpack(names_of(to), self._reader(source, kind), BITS[kind])
        if source.startswith("{"):
            return self._pack(to, names_of(source), BITS[kind])
        read = self._reader(source, kind)
        return lambda active: self._write(to, read(), active)

    def _unpack(self, names: list[str], read: Read, bits: int) -> Step:
        part = bits // len(names)

        def run(active: Mask) -> None:
            value = read()
            for k, name in enumerate(names):
                shifted = value >> value.dtype.type(part * k)
                self._write(name, shifted.astype(f"u{part // 8}"), active)

        return run

    def _pack(self, to: str, names: list[str], bits: int) -> Step:
        part, whole = bits // len(names), DTYPES[f"u{bits}"]
        reads = [self._reader(name, f"u{part}") for name in names]

        def run(active: Mask) -> None:
            value = np.zeros(1, whole)
            for k, read in enumerate(reads):
                value = value | (read().astype(whole) << whole.type(part * k))
            self._write(to, value, active)

        return run

    def _setp(self, one: Instruction) -> Step:
        how, *flush, kind = one.modifiers
        if set(flush) - {"ftz"}:
            raise NotImplementedError(one.text)
        names = one.operands[0].split("|")
        reads = [self._reader(operand, kind) for operand in one.operands[1:]]

        def run(active: Mask) -> None:
            a, b = (arithmetic.flushed(read()) if flush else read() for read in reads)
            holds = arithmetic.compared(how, a, b)
            for name, value in zip(names, (holds, ~holds), strict=False):
                self._write(name, value, active)

        return run

    def _selp(self, one: Instruction) -> Step:
        to, *values, condition = one.operands
        a, b = (self._reader(operand, one.modifiers[-1]) for operand in values)
        holds = self._reader(condition, "pred")
        return lambda active: self._write(to, np.where(holds(), a(), b()), active)

    def _cvt(self, one: Instruction) -> Step:
        *how, target, source = one.modifiers
        to, *given = one.operands
        reads = [self._reader(operand, source) for operand in given]
        if target.endswith("x2"):
            part = target.removesuffix("x2")
            convert = arithmetic.conversion(how, part, source)

            def both(active: Mask) -> None:
                high, low = (convert(read()).view(np.uint16) for read in reads)
                self._write_halves(to, low, high, active)

            return both
        convert = arithmetic.conversion(how, target, source)
        flush = arithmetic.flushed if "ftz" in how else (lambda x: x)
        before = flush if source == "f32" else (lambda x: x)
        after = flush if target == "f32" else (lambda x: x)
        return lambda active: self._write(to, after(convert(before(reads[0]()))), active)

    def _mad(self, one: Instruction) -> Step:
        how, kind = one.modifiers
        to, *factors, term = one.operands
        a, b = (self._reader(operand, kind) for operand in factors)
        c = self._reader(term, f"{kind[0]}{2 * BITS[kind]}" if how == "wide" else kind)
        product = arithmetic.PRODUCTS[how]
        return lambda active: self._write(to, product(a(), b()) + c(), active)

    def _shf(self, one: Instruction) -> Step:
        if one.modifiers[:2] != ("l", "wrap"):
            raise NotImplementedError(one.text)
        to, *given = one.operands
        reads = [self._reader(operand, "u32") for operand in given]
        return lambda active: self._write(
            to, arithmetic.funnel_left(*(read() for read in reads)), active
        )

    def _function(self, one: Instruction) -> Step:
        """One that makes a value of values of one type."""
        *how, kind = one.modifiers
        to, *given = one.operands
        function = self._named(one)
        if kind.endswith("x2"):
            pairs = [self._halves(operand, kind) for operand in given]
            part = kind.removesuffix("x2")

            def both(active: Mask) -> None:
                halves = zip(*(read() for read in pairs), strict=True)
                low, high = (arithmetic.narrowed(function(*half), part) for half in halves)
                self._write_halves(to, low, high, active)

            return both
        counts = arithmetic.COUNTS.get(one.name, ())
        reads = [self._reader(x, "u32" if k in counts else kind) for k, x in enumerate(given)]

        def run(active: Mask) -> None:
            values = [read() for read in reads]
            if "ftz" in how:
                value = arithmetic.flushed(function(*map(arithmetic.flushed, values)))
            else:
                value = function(*values)
            self._write(to, arithmetic.narrowed(value, kind) if kind == "bf16" else value, active)

        return run

    def _named(self, one: Instruction) -> Callable[..., Array]:
        """The function of an instruction's name and modifiers."""
        *how, kind = one.modifiers
        name, flags = one.name, set(how) - {"ftz"}
        integer = kind[0] in "us"
        if name == "mul" and integer:
            return arithmetic.PRODUCTS[how[0]]
        if name == "div" and integer and not flags:
            return arithmetic.divided
        if name == "fma" and kind == "f32" and flags == {"rn"}:
            return arithmetic.fma
        if name in arithmetic.OR_NAN and flags == {"NaN"}:
            return arithmetic.OR_NAN[name]
        if name in arithmetic.APPROXIMATE and kind == "f32" and len(flags) == 1:
            function, units = arithmetic.APPROXIMATE[name]
            if flags <= {"approx", "full"}:
                return lambda *values: self._off(function(*values), units)
            if flags == {"rn"}:
                return function
        if name in arithmetic.FUNCTIONS and flags <= {"rn"}:
            return arithmetic.FUNCTIONS[name]
        raise NotImplementedError(one.text)

    def _off(self, value: Array, units: int) -> Array:
        """What a device may give in place of a value that is right to the last bit."""
        if self.seed is None:
            return value
        bits = value.view(np.uint32)
        mixed = (bits ^ np.uint32(self.seed)) * np.uint32(0x9E3779B1)
        by = (mixed >> np.uint32(16)) % np.uint32(2 * units + 1) - np.uint32(units)
        size = np.abs(value)
        usual = (size > np.float32(2**-120)) & (size < np.float32(2**120))
        return np.where(usual, bits + by, bits).view(np.float32)

    # -- memory -----------------------------------------------------------------------------

    def _ld(self, one: Instruction) -> Step:
        space, kind, count = _access(one)
        names, address = names_of(one.operands[0]), one.operands[1]
        if space == "param":
            given = address.strip("[] ")
            return lambda active: self._write(names[0], self.arguments[given], active)
        where, dtype = self._address(address), DTYPES[kind]

        def run(active: Mask) -> None:
            lanes, addresses = self._running(where(), active)
            if space == "global":
                programs = self.programs[lanes]
                found = self.memory.load(addresses, dtype.itemsize, count, programs, one.text)
            else:
                place = self._place(addresses, dtype.itemsize, count, one.text)
                whole = self.shared.view(f"u{dtype.itemsize}")
                found = [whole[self.local[lanes], place + k] for k in range(count)]
            for name, value in zip(names, found, strict=True):
                spread = np.zeros(self.lanes, value.dtype)
                spread[lanes] = value
                self._write(name, spread.view(dtype), active)

        return run

    def _st(self, one: Instruction) -> Step:
        space, kind, count = _access(one)
        where, size = self._address(one.operands[0]), DTYPES[kind].itemsize
        reads = [self._reader(name, kind) for name in names_of(one.operands[1])]

        def run(active: Mask) -> None:
            lanes, addresses = self._running(where(), active)
            values = [self._each(read())[lanes].view(f"u{size}") for read in reads]
            if space == "global":
                self.memory.store(addresses, values, self.programs[lanes], one.text)
                return
            place = self._place(addresses, size, count, one.text)
            for k, value in enumerate(values):
                self.shared.view(f"u{size}")[self.local[lanes], place + k] = value

        return run

    def _atom(self, one: Instruction) -> Step:
        function, kind = one.modifiers[-2:]
        if "global" not in one.modifiers or kind[0] not in "usf":
            raise NotImplementedError(one.text)
        to, address, given = one.operands
        where, read = self._address(address), self._reader(given, kind)
        apply = arithmetic.REDUCTIONS[function]

        def run(active: Mask) -> None:
            lanes, addresses = self._running(where(), active)
            before = np.zeros(self.lanes, DTYPES[kind])
            values = self._each(read())[lanes]
            before[lanes] = self.memory.exchange(addresses, values, apply, one.text)
            self._write(to, before, active)

        return run


def _access(one: Instruction) -> tuple[str, str, int]:
    """A load's or store's memory, type, and count of elements."""
    *how, kind = one.modifiers
    spaces = [name for name in how if name in ("global", "shared", "param")]
    hints = {name for name in how if name.startswith(("L1:", "L2:"))}
    if len(spaces) != 1 or {*how} - {*spaces} - _HINTS - hints:
        raise NotImplementedError(one.text)
    count = 4 if "v4" in how else 2 if "v2" in how else 1
    return spaces[0], kind, count
