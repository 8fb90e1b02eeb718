"""Simulation of torch's CUDA caching allocator for a list of events.

The rules are those of c10/cuda/CUDACachingAllocator.cpp, for one stream. A request is rounded up to
512 bytes. Requests of at most 1 MiB are cut from segments of 2 MiB; requests below 10 MiB from
segments of 20 MiB; larger requests get a separate segment, rounded up to 2 MiB. The best-fitting
free block serves a request, and is split if enough remains. Freed neighbours merge. If the device
has no memory left, segments without used blocks are released, and the request is repeated. With
expandable segments a pool has one segment, which grows by pages of 2 or 20 MiB.
"""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from memtrain.audit.peak.timeline import NO_STORAGE, NOTHING, STATES, WEIGHTS, Event

UNIT = 512
"""Requests are rounded up to a multiple of this (kMinBlockSize)."""
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
"""The largest request of the small pool (kSmallSize), and its segments (kSmallBuffer)."""
LARGE, LARGE_SEGMENT = 10 * 2**20, 20 * 2**20
"""The smallest request with a separate segment (kMinLargeAlloc), and smaller ones' segments."""
ROUND_LARGE = 2 * 2**20
"""Separate segments are rounded up to a multiple of this (kRoundLarge)."""


@dataclass
class _Block:
    """A part of a segment, with its neighbours."""

    address: int
    nbytes: int
    small: bool
    used: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class CachingAllocator:
    """The blocks of one stream on a device with `capacity` bytes (None: without limit).

    `expandable` is `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. `allocate` raises
    `torch.OutOfMemoryError` if the capacity is too small.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.allocated, allocator.reserved
        (1024, 2097152)
        >>> allocator.free(block)
        >>> allocator.allocated, allocator.reserved
        (0, 2097152)
    """

    capacity: int | None = None
    expandable: bool = False
    allocated: int = 0
    """Bytes of used blocks."""
    reserved: int = 0
    """Bytes of segments."""
    peak_allocated: int = 0
    peak_reserved: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, _Block] = field(default_factory=dict)
    """Free blocks by address."""
    _next: int = 0
    _last: dict[bool, _Block] = field(default_factory=dict)
    """With expandable segments: the last block of each pool's segment."""

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least `nbytes`."""
        size = max(UNIT, -(-nbytes // UNIT) * UNIT)
        small = size <= SMALL
        block = self._best_fit(size, small) or self._grow(size, small)
        remaining = block.nbytes - size
        if remaining >= UNIT if small or self.expandable else remaining > SMALL:
            self._split(block, size)
        block.used = True
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Free a block, and merge it with free neighbours."""
        block.used = False
        self.allocated -= block.nbytes
        for other in (block.before, block.after):
            if other is not None and not other.used:
                self._take(other)
                self._merge(block, other)
        self._put(block)

    def empty_cache(self) -> None:
        """Release segments without used blocks, as `torch.cuda.empty_cache`."""
        for block in [*self._blocks.values()]:
            if block.before is None and block.after is None:
                self._take(block)
                self.reserved -= block.nbytes
                if self._last.get(block.small) is block:
                    del self._last[block.small]
        for small in self._last if self.expandable else ():  # whole pages at an end are unmapped
            page, last = SMALL_SEGMENT if small else LARGE_SEGMENT, self._tail(small)
            pages = last.nbytes // page * page if last is not None else 0
            if last is not None and 0 < pages < last.nbytes:
                self._take(last)
                last.nbytes -= pages
                self._put(last)
                self.reserved -= pages

    def _tail(self, small: bool) -> _Block | None:
        """The free block at the end of a pool's expandable segment."""
        last = self._last.get(small)
        return None if last is None or last.used else last

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        free = self._free[small]
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self._blocks[free[index][1]]
        self._take(block)
        return block

    def _grow(self, size: int, small: bool) -> _Block:
        """Return a new segment, or new pages of the pool's segment."""
        if self.expandable:
            return self._expand(size, small)
        if small:
            nbytes = SMALL_SEGMENT
        else:
            nbytes = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(nbytes)
        block = _Block(self._next, nbytes, small)
        self._next += nbytes + 1  # so that no two segments are neighbours
        return block

    def _expand(self, size: int, small: bool) -> _Block:
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        for attempt in range(2):  # the first may give pages of the tail back
            tail = self._tail(small)
            pages = -(-(size - (tail.nbytes if tail else 0)) // page) * page
            if not attempt:
                self._reserve(pages)
        if tail is not None:
            self._take(tail)
            tail.nbytes += pages
            return tail
        last = self._last.get(small)
        address = self._next if last is None else last.address + last.nbytes
        block = self._last[small] = _Block(address, pages, small, before=last)
        if last is None:
            self._next += 2**50  # of virtual addresses
        else:
            last.after = block
        return block

    def _reserve(self, nbytes: int) -> None:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            self.empty_cache()
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            raise torch.OutOfMemoryError("simulated")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.nbytes - size, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, size
        if self._last.get(block.small) is block:
            self._last[block.small] = rest
        self._put(rest)

    def _merge(self, block: _Block, other: _Block) -> None:
        first, second = (other, block) if other is block.before else (block, other)
        after = second.after
        if self._last.get(block.small) is second:
            self._last[block.small] = block
        block.address, block.nbytes = first.address, first.nbytes + second.nbytes
        block.before, block.after = first.before, after
        if block.before is not None:
            block.before.after = block
        if after is not None:
            after.before = block

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.nbytes, block.address))]
        del self._blocks[block.address]

    def _put(self, block: _Block) -> None:
        insort(self._free[block.small], (block.nbytes, block.address))
        self._blocks[block.address] = block


def expandable_segments() -> bool:
    """Return whether an environment variable requests expandable segments."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)


def reserved_nbytes(
    events: Sequence[Event], categories: Sequence[str], workspaces: Iterable[int] = ()
) -> int:
    """Return the smallest reserved bytes with which two simulated steps run, to 1%, by bisection.

    Without a limit the allocator caches more than a step needs. `events` and `categories` are those
    of a recorder; `workspaces` are bytes that libraries allocate once and keep.
    """
    workspaces = [*workspaces]
    free = run_steps(events, categories, workspaces, None)
    low, high = free.peak_allocated, free.peak_reserved
    while high - low > max(high // 100, ROUND_LARGE):
        middle = (low + high) // 2
        try:
            high = run_steps(events, categories, workspaces, middle).peak_reserved
        except torch.OutOfMemoryError:
            low = middle
    return high


def run_steps(
    events: Sequence[Event],
    categories: Sequence[str],
    workspaces: Sequence[int] = (),
    capacity: int | None = None,
) -> CachingAllocator:
    """Return the allocator after two simulated steps; arguments as for `reserved_nbytes`."""
    allocator = CachingAllocator(capacity, expandable_segments())
    begin = next((k for k, event in enumerate(events) if event[0] == NO_STORAGE), 0)
    blocks: _Blocks = {}
    _serve(allocator, blocks, {}, events[:begin], categories)
    for nbytes in workspaces:
        allocator.allocate(nbytes)
    before = {*blocks}
    for _ in range(2):
        remaining = {key: blocks.pop(key) for key in [*blocks] if key not in before}
        # Gradients are freed before the next step; a new state replaces the state of this step.
        for storage in [key for key in remaining if categories[key] not in _LASTING]:
            allocator.free(remaining.pop(storage)[1])
        _serve(allocator, blocks, remaining, events[begin:], categories)
    return allocator


_Blocks = dict[int, tuple[int, _Block]]
_LASTING = (WEIGHTS, STATES)


def _serve(
    allocator: CachingAllocator,
    blocks: _Blocks,
    replaced: _Blocks,
    events: Iterable[Event],
    categories: Sequence[str],
) -> None:
    """Allocate and free; a storage that replaces one of the previous step frees that one."""
    for storage, delta, _, _ in events:
        if storage == NO_STORAGE or categories[storage] == NOTHING:
            continue
        nbytes, block = blocks.pop(storage, (0, None))
        if block is not None:
            allocator.free(block)
        if (now := nbytes + delta) > 0:
            blocks[storage] = now, allocator.allocate(now)
        if storage in replaced:
            allocator.free(replaced.pop(storage)[1])
