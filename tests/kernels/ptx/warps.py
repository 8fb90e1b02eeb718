"""Instructions of whole warps: values and matrices that threads exchange."""

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx import arithmetic
from tests.kernels.ptx.arithmetic import Array
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.program import Instruction
from tests.kernels.ptx.registers import Mask, Registers, Step, names_of

WARP = 32


class Warps(Registers):
    """Makes the steps of these instructions."""

    def _shfl(self, one: Instruction) -> Step:
        _, mode, _ = one.modifiers
        if mode not in ("bfly", "idx"):
            raise NotImplementedError(one.text)
        name, _, valid = one.operands[0].partition("|")
        value, step, clamp = (self._reader(operand, "u32") for operand in one.operands[1:4])

        def run(active: Mask) -> None:
            self._check_warps(active, one.text)
            lane = self.special["%laneid"].astype(np.int64)
            by, limits = (self._each(read()).astype(np.int64) for read in (step, clamp))
            by &= 31
            segment, least = (limits >> 8) & 31, limits & 31
            first = lane & segment
            source = lane ^ by if mode == "bfly" else first | (by & ~segment)
            inside = source <= first | (least & ~segment)
            taken = np.arange(self.lanes) - lane + np.where(inside, source, lane)
            self._write(name, self._each(value())[taken], active)
            if valid:
                self._write(valid, inside, active)

        return run

    def _redux(self, one: Instruction) -> Step:
        _, function, kind = one.modifiers
        read, reduce = self._reader(one.operands[1], kind), arithmetic.REDUCTIONS[function].reduce

        def run(active: Mask) -> None:
            self._check_warps(active, one.text)
            by_warp = self._each(read()).reshape(-1, WARP)
            found = reduce(by_warp, axis=1, dtype=by_warp.dtype)
            self._write(one.operands[0], np.repeat(found, WARP), active)

        return run

    def _ldmatrix(self, one: Instruction) -> Step:
        names, places = self._matrices(one, *one.operands)

        def run(active: Mask) -> None:
            for k, name in enumerate(names):
                warps, *where = places(k, active)
                rows = self.shared.view(np.uint16)[tuple(where)]
                rows = rows.swapaxes(1, 2) if "trans" in one.modifiers else rows
                value = np.zeros((self.lanes // WARP, WARP), np.uint32)
                value[warps] = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, WARP)
                self._write(name, value.ravel(), active)

        return run

    def _stmatrix(self, one: Instruction) -> Step:
        names, places = self._matrices(one, *one.operands[::-1])
        reads = [self._reader(name, "u32") for name in names]

        def run(active: Mask) -> None:
            for k, read in enumerate(reads):
                warps, *where = places(k, active)
                value = self._each(read()).reshape(-1, WARP)[warps]
                rows = np.ascontiguousarray(value).view(np.uint16).reshape(-1, 8, 8)
                rows = rows.swapaxes(1, 2) if "trans" in one.modifiers else rows
                self.shared.view(np.uint16)[tuple(where)] = rows

        return run

    def _matrices(
        self, one: Instruction, names: str, address: str
    ) -> tuple[list[str], Callable[[int, Mask], tuple[Array, Array, Array]]]:
        """Registers of matrices of 8 x 8 elements of 16 bits, of which a thread holds two.

        Returns:
            names: Of each matrix's register.
            places: Given a matrix's number, and who runs: numbers of the warps, of their shared
                memories, and of the elements there, in rows whose addresses eight threads give.
        """
        if not {"sync", "aligned", "m8n8", "b16"} <= {*one.modifiers}:
            raise NotImplementedError(one.text)
        where = self._address(address)

        def places(matrix: int, active: Mask) -> tuple[Array, Array, Array]:
            self._check_warps(active, one.text)
            running = self.alive if active is None else active
            warps = np.flatnonzero(running.reshape(-1, WARP)[:, 0])
            rows = self._each(where()).reshape(-1, WARP)[warps, 8 * matrix : 8 * matrix + 8]
            first = 8 * self._place(rows, 16, 1, one.text)
            local = self.local.reshape(-1, WARP)[warps, 0]
            return warps, local[:, None, None], first[:, :, None] + np.arange(8)

        return names_of(names), places

    def _check_warps(self, active: Mask, text: str) -> None:
        if active is not None and not is_whole(active, self.alive, WARP):
            raise Fault(f"not all threads of a warp come to it: {text}")


def is_whole(active: Array, alive: Array, size: int) -> bool:
    """Whether of each `size` threads all that are left run, or none."""
    active, alive = active.reshape(-1, size), alive.reshape(-1, size)
    return bool(((active == alive).all(1) | ~active.any(1)).all())
