"""Registers of the threads that run side by side, and the operands that name them."""

import re
from collections.abc import Callable

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.arithmetic import BITS, DTYPES, Array
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.program import Program

Mask = Array | None
"""Which threads run; None: all that are left."""
Step = Callable[[Mask], None]
Read = Callable[[], Array]

_SPECIAL = ("%tid", "%ctaid", "%nctaid", "%laneid")


class Registers:
    """Reads and writes operands.

    Args:
        program: Gives the registers' widths.
        shared: Bytes of shared memory of a program of a grid.
    """

    def __init__(self, program: Program, shared: int) -> None:
        self.program = program
        self.nshared = -(-shared // 16) * 16
        self.registers: dict[str, Array] = {}
        self.special: dict[str, Array] = {}
        self.alive = np.zeros(0, bool)
        self.local = np.zeros(0, np.int64)
        self.shared = np.zeros((0, 0), np.uint8)
        self.lanes = 0

    def _holds(self, guard: tuple[str, bool]) -> Array:
        name, wanted = guard
        return self._bits(name) if wanted else ~self._bits(name)

    def _width(self, name: str) -> int:
        widths = self.program.widths
        return widths[name] if name in widths else widths[name.rstrip("0123456789")]

    def _bits(self, name: str) -> Array:
        """A register's bits; of one that was not set, all."""
        value = self.registers.get(name)
        if value is None:
            width = self._width(name)
            value = np.ones(1, bool) if width == 1 else ~np.zeros(1, f"u{width // 8}")
        return value

    def _reader(self, operand: str, kind: str) -> Read:
        """What gives an operand's values in a type."""
        if operand.startswith(_SPECIAL):
            return lambda: self.special[operand]
        if not operand.startswith("%"):
            value = _immediate(operand, kind)
            return lambda: value
        if kind == "pred":
            return lambda: self._bits(operand)
        if kind == "bf16":
            return lambda: arithmetic.from_bfloat16(self._bits(operand))
        dtype = DTYPES[kind]
        if self._width(operand) == BITS[kind]:
            return lambda: self._bits(operand).view(dtype)
        return lambda: self._bits(operand).astype(f"u{dtype.itemsize}").view(dtype)

    def _halves(self, operand: str, kind: str) -> Callable[[], list[Array]]:
        """What gives both halves of 32 bits."""
        read = self._reader(operand, "u32")

        def halves() -> list[Array]:
            value = read()
            parts = [(value >> np.uint32(shift)).astype(np.uint16) for shift in (0, 16)]
            if kind == "bf16x2":
                return [arithmetic.from_bfloat16(part) for part in parts]
            return [part.view(DTYPES[kind.removesuffix("x2")]) for part in parts]

        return halves

    def _write(self, name: str, value: Array, active: Mask) -> None:
        """Set a register of the threads that run."""
        if name == "_":
            return
        width = self._width(name)
        if width > 1:
            bits = np.dtype(f"u{width // 8}")
            if value.dtype.itemsize != bits.itemsize:  # with its sign, where it has one
                value = value.astype(f"i{width // 8}" if value.dtype.kind == "i" else bits)
            value = value.view(bits)
        if active is not None:
            value = np.where(active, value, self._bits(name))
        self.registers[name] = value

    def _write_halves(self, name: str, low: Array, high: Array, active: Mask) -> None:
        whole = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
        self._write(name, whole, active)

    def _address(self, operand: str) -> Read:
        """What gives an address in brackets: of global memory, or a place in shared memory."""
        base, _, offset = (part.strip() for part in operand.strip("[] ").partition("+"))
        wide = base.startswith("%") and self._width(base) == 64
        read, by = self._reader(base, "u64" if wide else "u32"), int(offset or "0", 0)
        return lambda: (read().astype(np.int64) + by).view(np.uint64)

    def _each(self, value: Array) -> Array:
        return np.broadcast_to(value, self.lanes)

    def _running(self, addresses: Array, active: Mask) -> tuple[Array, Array]:
        """Numbers of the threads that run, and their addresses."""
        lanes = np.flatnonzero(self.alive if active is None else active)
        return lanes, self._each(addresses)[lanes]

    def _place(self, addresses: Array, size: int, count: int, text: str) -> Array:
        """Numbers of the elements at some places in shared memory."""
        if (addresses % np.uint64(size * count)).any():
            raise Fault(f"misaligned address: {text}")
        if (addresses + np.uint64(size * count) > self.nshared).any():
            raise Fault(f"outside of {self.nshared} bytes of shared memory: {text}")
        return (addresses // np.uint64(size)).astype(np.int64)


def names_of(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _immediate(operand: str, kind: str) -> Array:
    """A number in the text; the name of shared memory stands for its first place."""
    if kind == "pred":
        return np.array([int(operand, 0) != 0])
    if kind == "bf16":
        return arithmetic.from_bfloat16(_immediate(operand, "u16"))
    dtype = DTYPES[kind]
    if bits := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", operand):
        return np.array([int(bits[1], 16)], f"u{len(bits[1]) // 2}").view(dtype)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", operand):
        number = int(operand.rstrip("U"), 0) & (2 ** (8 * dtype.itemsize) - 1)
        return np.array([number], f"u{dtype.itemsize}").view(dtype)
    if operand.isidentifier():
        return np.zeros(1, dtype)
    raise NotImplementedError(f"operand {operand!r}")
