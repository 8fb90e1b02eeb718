"""Global memory of a launch: the process's own, of which only tensors may be touched."""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tests.kernels.ptx.arithmetic import Array


class Fault(RuntimeError):
    """What a device would refuse, or leave undefined."""


_FIRST = 2**16
_SPACE = 2**47 - 2**17
_KINDS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


@functools.cache
def _elements(size: int) -> Array:
    """The process's memory as numbers of so many bytes, from address `_FIRST` on."""
    return np.frombuffer((_KINDS[size] * (_SPACE // size)).from_address(_FIRST), f"u{size}")


def _places(addresses: Array, size: int) -> Array:
    return (addresses - np.uint64(_FIRST)) // np.uint64(size)


class Memory:
    """Where a launch may read and write, and which of its programs did.

    Args:
        ranges: First and last address, exclusive, of what may be touched.
        more: Gives other ranges; asked once, where an address is in none of these.
    """

    def __init__(
        self, ranges: Iterable[tuple[int, int]], more: Callable[[], Iterable[tuple[int, int]]]
    ) -> None:
        self._more: Callable[[], Iterable[tuple[int, int]]] | None = more
        self._set(ranges)
        self._read: list[tuple[Array, Array, int]] = []
        self._written: list[tuple[Array, Array, int]] = []

    def load(
        self, addresses: Array, size: int, count: int, programs: Array, text: str
    ) -> list[Array]:
        """Read `count` numbers of `size` bytes side by side at each address.

        Args:
            addresses: Of each thread.
            size: Bytes of a number.
            count: How many.
            programs: Of each thread, the number of its program.
            text: The instruction, for errors.
        """
        self.check(addresses, size * count, text)
        self._read.append((addresses, programs, size * count))
        place = _places(addresses, size)
        return [_elements(size)[place + np.uint64(k)] for k in range(count)]

    def store(self, addresses: Array, values: Sequence[Array], programs: Array, text: str) -> None:
        """Write numbers side by side at each address; arguments as those of `load`."""
        size = values[0].dtype.itemsize
        self.check(addresses, size * len(values), text)
        self._written.append((addresses, programs, size * len(values)))
        place = _places(addresses, size)
        for k, value in enumerate(values):
            _elements(size)[place + np.uint64(k)] = value

    def exchange(
        self, addresses: Array, values: Array, apply: Callable[[Array, Array], Array], text: str
    ) -> Array:
        """Change the number at each address in turn; what was there before."""
        size = values.dtype.itemsize
        self.check(addresses, size, text)
        before = np.empty_like(values)
        for k, place in enumerate(_places(addresses, size)):
            old = _elements(size)[place : place + np.uint64(1)].view(values.dtype)
            before[k] = old[0]
            old[:] = apply(old, values[k : k + 1])
        return before

    def check(self, addresses: Array, nbytes: int, text: str) -> None:
        """Raise a `Fault` where an access is misaligned, or outside of every tensor."""
        if (addresses % np.uint64(nbytes)).any():
            raise Fault(f"misaligned address: {text}")
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (place >= 0) & (addresses + np.uint64(nbytes) <= self._ends[place])
        if inside.all():
            return
        if self._more is None:
            raise Fault(f"{int(addresses[~inside][0]):#x} is outside of every tensor: {text}")
        more, self._more = self._more, None
        self._set([*self._ranges, *more()])
        self.check(addresses, nbytes, text)

    def _set(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((start, end))
        self._ranges = merged or [(0, 0)]
        self._starts, self._ends = np.array(self._ranges, np.uint64).T

    def check_programs(self) -> None:
        """Raise a `Fault` where a program touched what another one wrote."""
        if not self._written:
            return
        where, who = _bytes(self._written)
        order = np.lexsort((who, where))
        where, who = where[order], who[order]
        twice = (where[1:] == where[:-1]) & (who[1:] != who[:-1])
        if twice.any():
            raise Fault(f"two programs write the byte at {int(where[1:][twice][0]):#x}")
        if not self._read:
            return
        where, first = np.unique(where, return_index=True)
        read, by = _bytes(self._read)
        place = np.minimum(np.searchsorted(where, read), len(where) - 1)
        other = (where[place] == read) & (who[first][place] != by)
        if other.any():
            raise Fault(f"a program reads the byte that another writes: {int(read[other][0]):#x}")


def _bytes(touched: list[tuple[Array, Array, int]]) -> tuple[Array, Array]:
    """Each byte that was touched, and by which program."""
    where, who = [], []
    for addresses, programs, nbytes in touched:
        where.append((addresses[:, None] + np.arange(nbytes, dtype=np.uint64)).ravel())
        who.append(np.repeat(programs, nbytes))
    return np.concatenate(where), np.concatenate(who)
