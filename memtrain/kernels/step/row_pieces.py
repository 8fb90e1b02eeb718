"""The step of a matrix whose gradient is made a few rows at a time, and never exists whole."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend_of, choose, is_for_cuda, is_simulated
from memtrain.kernels.step.codecs import ROWS_AND_COLUMNS, Codec
from memtrain.kernels.step.groups import ROWS, Group, elements, inputs_of
from memtrain.kernels.step.step import SCALARS_FIELD, Entry, cpu_table, fits
from memtrain.kernels.step.update_rules import stacked_rows

Make = Callable[[int, int], Tensor]
"""First row, and the row after the last -> these rows of a gradient: [rows, columns]."""
Use = Callable[[int, Tensor], None]
"""A piece's first row, and the piece -> nothing: its use."""
Measure = Callable[[Tensor], float | Tensor]
"""The norm of a piece."""
_LINE = 64  # bytes


class RowPieces:
    """A gradient that is made some rows at a time, anew each time that it is gone through.

    Args:
        make: Makes rows of it, alike each time.
        param: The parameter: the gradient has its shape and device.
        rows: At most so many at once, of `rows_at_once`.
        measure: Gives the norm of rows; None where no one asks for the norm.

    Memory:
        One piece while it is used.

    Example:
        >>> whole, norm = torch.ones(4, 3), torch.linalg.vector_norm
        >>> pieces = RowPieces(lambda begin, end: whole[begin:end], whole, 2, norm)
        >>> pieces.visit(lambda begin, piece: print(begin, tuple(piece.shape)))
        0 (2, 3)
        2 (2, 3)
        >>> round(pieces.norm.item() ** 2)
        12
    """

    def __init__(
        self, make: Make, param: Tensor, rows: int, measure: Measure | None = None
    ) -> None:
        self.param, self.rows, self.dtype = param, rows, param.dtype
        self.norm = param.new_empty((), dtype=torch.float32) if measure else None
        """Float32, of the whole as `make` makes it: known once it was gone through."""
        self._make, self._measure = make, measure
        self._change: Callable[[Tensor], Tensor] = lambda piece: piece

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Let pieces be changed, and have another dtype, before they are used."""
        self._change, self.dtype = change, dtype

    def visit(self, use: Use | None = None) -> None:
        """Make each piece and use it; the first time, their norm becomes known."""
        norms: list[Any] = []
        for begin in range(0, len(self.param), self.rows):
            self._visit(begin, use, norms)
        if self.norm is not None and self._measure is not None:
            late = isinstance(norms[0], Tensor)
            self.norm.fill_(vector_norm(torch.stack(norms)) if late else math.hypot(*norms))
            self._measure = None

    def _visit(self, begin: int, use: Use | None, norms: list[Any]) -> None:
        piece = self._make(begin, min(begin + self.rows, len(self.param)))
        if self._measure is not None:
            norms.append(self._measure(piece))
        if use is not None:
            use(begin, self._change(piece).contiguous())

    def know_norm(self) -> None:
        """Go through it for its norm, where that is asked for and not known."""
        if self._measure is not None:
            self.visit()


def stand_in(param: Tensor) -> Tensor:
    """Zeros in the place of a parameter's gradient: one element, in its shape and dtype."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


def rows_at_once(entry: Entry, nbytes: int) -> int:
    """The rows of a gradient's pieces: whole blocks, of so many bytes at most where they can be.

    Args:
        entry: Of the parameter; its gradient and scalars are not read.
        nbytes: Of a piece.

    Returns:
        Rows of a piece; 0 where no kernel takes pieces of this entry, or one would be all of it.
    """
    rows, cols = entry.matrix
    if entry.param.dim() != 2 or entry.shard is not None or not fits(entry) or not rows * cols:
        return 0
    backend = backend_of(entry.param)
    if backend == "reference":
        return 0
    if backend == "triton":
        each = elements(entry._replace(grad=entry.param))
        multiple = math.lcm(ROWS, each // math.gcd(each, cols))  # whole programs of both passes
    else:
        block = entry.codecs[0].block if entry.codecs else Codec().block
        multiple = block // math.gcd(block, cols)
    most = nbytes // (cols * entry.param.itemsize) // multiple * multiple
    found = max(most, multiple)
    return found if found < rows else 0


def step(entry: Entry, pieces: RowPieces) -> None:
    """Step one parameter as `step.fused_step` does, bit for bit, from a gradient in pieces.

    States that know rows and columns of the whole tensor, and a norm that is not known, take a pass
    over the pieces before the one that steps: each piece is made twice. Where the norm is not
    finite, nothing is changed; Triton's kernels read it where it lies, and nothing waits.

    Args:
        entry: Of the parameter, with a stand-in of the gradient.
        pieces: Of `rows_at_once` rows.

    Memory:
        A piece, and what `fused_step` holds for the call.
    """
    on_device = is_for_cuda(entry.param) if is_simulated() else choose(entry.param) != "cpu"
    passes = _device_passes(entry, pieces) if on_device else _CpuPasses(entry, pieces)
    if entry.form in ROWS_AND_COLUMNS:
        pieces.visit(passes.reduce)
    else:
        pieces.know_norm()
    if isinstance(passes, _CpuPasses) and passes.refused():
        return
    passes.finalize_scales()
    pieces.visit(passes.update)
    passes.end()


def _device_passes(entry: Entry, pieces: RowPieces) -> Group:
    if is_simulated():
        found = Group([entry])
    else:
        from memtrain.kernels.step.launch import TritonGroup  # Triton is optional

        grad = entry.grad.new_empty(0, dtype=pieces.dtype)
        found = TritonGroup([entry._replace(grad=grad)])
    found.begin(inputs_of([entry._replace(guard=pieces.norm)]))
    return found


class _CpuPasses:
    """The passes of the C++ kernels, which find a piece where it would be in the whole gradient."""

    def __init__(self, entry: Entry, pieces: RowPieces) -> None:
        self._norm, self._before = pieces.norm, None
        if entry.form == "factored" and pieces.norm is not None:  # the first pass writes there
            self._before = entry.states[-1]["row"], entry.states[-1]["row"].clone()
        self._held = 0
        if is_simulated():
            return
        self._row = entry.matrix[1] * pieces.dtype.itemsize  # bytes
        table = cpu_table([entry._replace(grad=torch.empty(0, dtype=pieces.dtype))])
        self._scalars = stacked_rows([entry.scalars])
        table[:, SCALARS_FIELD] = self._scalars.ctypes.data
        size = np.zeros(1, np.int64)
        cpu.call("mt_rows_bytes", table.ctypes.data, size.ctypes.data)
        self._memory = np.empty(int(size[0]) + _LINE, np.uint8)
        self._held = -(-self._memory.ctypes.data // _LINE) * _LINE
        cpu.call("mt_rows_begin", table.ctypes.data, self._held)

    def refused(self) -> bool:
        """Whether the norm, now known, is not finite: then all is as it was."""
        refused = self._norm is not None and not math.isfinite(self._norm.item())
        if refused and self._before is not None:
            self._before[0].copy_(self._before[1])
        return refused

    def reduce(self, begin: int, piece: Tensor) -> None:
        """Pass 1."""
        self._run(begin, piece, first=True)

    def finalize_scales(self) -> None:
        """Between the passes."""
        if self._held:
            cpu.call("mt_rows_scales", self._held)

    def update(self, begin: int, piece: Tensor) -> None:
        """Pass 2."""
        self._run(begin, piece, first=False)

    def _run(self, begin: int, piece: Tensor, *, first: bool) -> None:
        if self._held:
            start = piece.data_ptr() - begin * self._row
            cpu.call("mt_rows_pass", self._held, start, int(first), begin, begin + len(piece))

    def end(self) -> None:
        """After the passes."""
        if self._held:
            cpu.call("mt_rows_end", self._held)
