"""First moments of about two bits in other codes than ours: candidates of the literature.

Nothing here is kept in few bits: `SimulatedAdamW` takes each first moment through a code and back
at every step, and tells the bytes that its payload would have by formula. So a code is tried over
seeds (`experiments.optimizer_states`) before anything is packed or fused for it.

A code is a function of blocks, float32 [n, 128], and a key for its random bits, that returns what
would come back of them. Where no paper says how blocks are scaled, the scale is that of least
squared error, in bfloat16 and rounded down, so that nothing comes back longer than it was.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from memtrain.compressors import Block, Factored
from memtrain.compressors.base import Key
from memtrain.kernels.codebook import lloyd_max
from memtrain.kernels.codebook.quantize import inverse
from memtrain.kernels.packing import bits as bitpack
from memtrain.kernels.step import update_rules
from memtrain.kernels.step.codecs import ratio
from memtrain.optim import compress, state_bytes
from memtrain.optim.states import layout

BLOCK = 128
NORMAL_LOSS = 0.1175
"""Mean squared error of four values for a normal number (`lloyd_max.VALUES`)."""
_EIGHT = Block(map="DE", bits=8, block_size=256)
Code = Callable[[Tensor, Key], Tensor]


class Form(NamedTuple):
    """A way to keep a first moment."""

    code: Code
    bytes: float
    """Per element."""
    over_factors: bool = False
    """Whether the moment is divided by the roots of the second one's factors first."""
    residual: bool = False
    """Whether what is lost goes to the weight at once, as in a fused step of 2 bits."""
    top: int = 0
    """So many of the matrix's singular pairs are held in 8 bits, and the code has what is left."""
    over_grid: bool = False
    """Whether what is left is divided by its own `grid` first."""

    @property
    def bytes_per_line(self) -> float:
        """Per row and per column: of the factors' roots or the grid, and of the pairs."""
        return 4 * self.over_factors + 2 * self.over_grid + self.top * (1 + 4 / _EIGHT.block_size)


def exact(blocks: Tensor, key: Key) -> Tensor:
    """All of it."""
    return blocks


def codebook(blocks: Tensor, key: Key, *, name: str, bits: int, rounding: str) -> Tensor:
    """Codes of one of the package's codebooks under the block's maximum."""
    block = Block(map=name, bits=bits, rounding=rounding)
    return block.decompress(block.compress(blocks, key=key))


def normal(blocks: Tensor, key: Key) -> Tensor:
    """Four values for normal numbers, as our 2 bits have them (`kernels.codebook.lloyd_max`)."""
    n, size = blocks.shape
    ones = blocks.new_ones(n), blocks.new_ones(size)
    return lloyd_max.decode(*lloyd_max.encode(blocks, *ones), *ones)


def noise(blocks: Tensor, key: Key) -> Tensor:
    """The error of `normal` without its code: as long, as far off, and at random. A control."""
    size = blocks.square().mean(1, keepdim=True).sqrt()
    drawn = _drawn(torch.randn, blocks, key)
    return (1 - NORMAL_LOSS) * blocks + math.sqrt(NORMAL_LOSS * (1 - NORMAL_LOSS)) * size * drawn


def logarithmic(blocks: Tensor, key: Key, *, bits: int) -> Tensor:
    """A sign, and a power of a base for the magnitude: SOLO's grid, which is one of magnitudes.

    The lowest power is the block's 10% quantile, the highest its maximum; the logarithm is rounded
    stochastically.

    Reference:
        Xu et al., Pushing the Limits of Low-Bit Optimizers, arXiv:2505.00347.
    """
    size, last = blocks.abs(), 2 ** (bits - 1) - 1
    scale = size.amax(1, keepdim=True)
    lowest = (size.quantile(0.1, 1, keepdim=True) / scale).clamp(1e-6, 0.999)
    base = _bfloat16(lowest ** (1 / last)).log2()
    drawn = _drawn(torch.rand, size, key) - 0.5
    powers = ((size / scale).log2() / base + drawn).round().clamp(0, last)
    found = torch.exp2(powers * base) * _bfloat16(scale) * blocks.sign()
    return torch.where(scale > 0, found, 0.0)


RINGS = {16: ((6, 0.92), (9, 1.906)), 8: ((7, 1.454),)}
"""Points of a pair -> points of each ring around 0, and its radius: of least squared error for two
normal numbers (0.108 and 0.203 an element; four values for one number: 0.1175)."""


def polar(blocks: Tensor, key: Key, *, points: int) -> Tensor:
    """Pairs of neighbours by the nearest of points on rings: 0, and `RINGS`.

    Reference:
        2D Quantization for Ultra-low-bit Optimizers, a submission to ICLR 2026, has polar codes of
        1.5 and 2 bits; its own rings are not known here.
    """
    pairs = blocks.view(len(blocks), -1, 2)
    size = blocks.square().mean(1).sqrt().view(-1, 1, 1)
    known = ring_points(points).to(blocks.device)
    nearest = torch.cdist(_over(pairs, size), known).argmin(2)
    return projected(blocks, known[nearest].view_as(blocks))


@cache
def ring_points(points: int) -> Tensor:
    """The points of a pair, [points, 2]; 0 first, and the last ring turned by half of a step."""
    found = [torch.zeros(1, 2)]
    for count, radius in RINGS[points]:
        turned = math.pi / count if (count, radius) == RINGS[points][-1] else 0.0
        angles = 2 * math.pi * torch.arange(count) / count + turned
        found.append(radius * torch.stack([angles.cos(), angles.sin()], 1))
    return torch.cat(found)


def with_error(blocks: Tensor, key: Key) -> Tensor:
    """A sign and a mean magnitude, and the same of what these lose: error feedback, of 1 + 1 bits.

    Feedback adds what a code has lost to what is coded next. Where the state is the only thing
    coded, the loss must be kept with it: in a payload of its own, in bits.
    """
    signs = blocks.signbit().float() * -2 + 1
    first = projected(blocks, signs)
    lost = blocks - first
    return first + projected(lost, lost.signbit().float() * -2 + 1)


def means(blocks: Tensor, key: Key, *, fold: int) -> Tensor:
    """The mean of every so many neighbours, in float32. With `Form.residual` it is FOAM's moment.

    Its update is the means' moment and all of the gradient's difference from its means: what is
    not kept is given to the weight at once.

    Reference:
        Wen et al., FOAM: Blocked State Folding, arXiv:2512.07112.
    """
    folded = blocks.view(len(blocks), -1, fold).mean(2, keepdim=True)
    return folded.expand(-1, -1, fold).reshape(blocks.shape)


def rotated(blocks: Tensor, key: Key) -> Tensor:
    """`normal` of blocks that a Hadamard matrix has rotated, which makes numbers more normal."""
    turn = hadamard(blocks.shape[1]).to(blocks.device)
    return normal(blocks @ turn, key) @ turn


@cache
def hadamard(size: int) -> Tensor:
    """Sylvester's matrix for a power of 2, symmetric and its own inverse."""
    found = torch.ones(1, 1)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / math.sqrt(size)


def top_pairs(matrix: Tensor, count: int, key: Key) -> Tensor:
    """A matrix's part in its first singular pairs: their vectors' product, each in 8 bits.

    Reference:
        Wu et al., Achieving low-bit Muon through subspace preservation and grid quantization (ICLR
        2026): one power iteration from the last step's vectors. Here it is three from random ones.
    """
    right = _drawn(torch.randn, matrix.new_empty(matrix.shape[1], count), key)
    left = matrix
    for _ in range(3):
        left = torch.linalg.qr(matrix @ right).Q
        right = matrix.T @ left
    left, right = (_EIGHT.decompress(_EIGHT.compress(own.T, key=key)) for own in (left, right))
    return left.T @ right


def grid(matrix: Tensor) -> Tensor:
    """The lesser of each element's row's and column's maximum, as bfloat16: GRASP's grid."""
    size = matrix.abs()
    return torch.minimum(_bfloat16(size.amax(1, keepdim=True)), _bfloat16(size.amax(0)))


def projected(blocks: Tensor, points: Tensor) -> Tensor:
    """`points` times the scale of each block that leaves the least squared error, in bfloat16."""
    scale = (blocks * points).sum(1, keepdim=True) / points.square().sum(1, keepdim=True)
    return points * _bfloat16(torch.where(scale.isfinite(), scale, 0.0))


def _bfloat16(x: Tensor) -> Tensor:
    """Rounded towards 0, as `lloyd_max` rounds its scales."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def _over(x: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, x / size, 0.0)


def _drawn(draw: Callable[..., Tensor], like: Tensor, key: Key) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(key.bits() & (1 << 63) - 1)
    return draw(like.shape, generator=generator, device=like.device)


_SCALE = 2 / BLOCK
_DE = partial(codebook, name="DE", rounding="nearest")
_SR = partial(codebook, rounding="stochastic")

ALONE = {
    "sr_4bit": Form(partial(_SR, name="DE", bits=4), 4 / 8 + 4 / BLOCK),
    "sr_3bit": Form(partial(_SR, name="DE", bits=3), 3 / 8 + 4 / BLOCK),
    "sr_2bit": Form(partial(_SR, name="Linear", bits=2), 2 / 8 + 4 / BLOCK),
    "de_2bit": Form(partial(_DE, bits=2), 2 / 8 + 4 / BLOCK),
    "normal_2bit": Form(normal, 2 / 8 + _SCALE),
    "log_3bit": Form(partial(logarithmic, bits=3), 3 / 8 + 2 * _SCALE),
    "log_2bit": Form(partial(logarithmic, bits=2), 2 / 8 + 2 * _SCALE),
    "polar_2bit": Form(partial(polar, points=16), 4 / 2 / 8 + _SCALE),
    "polar_1.5bit": Form(partial(polar, points=8), 3 / 2 / 8 + _SCALE),
    "error_2bit": Form(with_error, 2 / 8 + 2 * _SCALE),
    "hadamard_2bit": Form(rotated, 2 / 8 + _SCALE),
    **{f"grasp_{k}": Form(normal, 2 / 8 + _SCALE, top=k, over_grid=True) for k in (1, 2, 4)},
    "noise_2bit": Form(noise, 4.0),
}
"""Candidates as they are: in blocks of the moment itself, and what is lost is lost."""

FORMS = {
    **ALONE,
    "foam_16": Form(partial(means, fold=16), 4 / 16, residual=True),
    "exact_moment": Form(exact, 4.0),
    **{
        f"{name}_framed": form._replace(over_factors=True, over_grid=False, residual=True)
        for name, form in (*ALONE.items(), ("means_16", Form(partial(means, fold=16), 4 / 16)))
        if not name.endswith(("4bit", "3bit")) and name != "de_2bit"
    },
}
"""`ALONE`; FOAM; an exact moment; and `_framed`: codes in the frame of our 2 bits, that is over the
roots of the second moment's factors, and what is lost goes to the weight at once. `normal_2bit` so
framed is `optim=factored_2bit`."""


class SimulatedAdamW(Optimizer):
    """AdamW with a factored second moment, and a first one that each step takes through a code.

    The step is the fused one's reference (`kernels.step.step_reference`). Parameters whose factors
    do not pay keep the states that `optim=factored_2bit` gives them.

    Args:
        groups: Parameters in groups, each with its options; float32.
        lr: As of AdamW, like the others.
        betas: Decay of both moments.
        weight_decay: Decoupled.
        form: Of the first moment.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        form: Form,
    ) -> None:
        self.form = form
        defaults = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        others = [
            {**group, "params": [p for p in group["params"] if not is_coded(p)]}
            for group in self.param_groups
        ]
        choose = layout.Choice(first="B128/DE", second="factored")
        self.others = compress(AdamW(others, **defaults), choose)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        for group, other in zip(self.param_groups, self.others.param_groups, strict=True):
            other["lr"] = group["lr"]
            for number, param in enumerate(group["params"]):
                if is_coded(param) and param.grad is not None:
                    self._step(param, param.grad, group, number)
        self.others.step()

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state, shape = self.state[param], param.shape
        rows, columns = shape[0], shape[1:].numel()
        if not state:
            zeros = {"exp_avg": (rows, columns), "row": (rows,), "col": (columns,)}
            state.update(step=0, **{name: param.new_zeros(size) for name, size in zeros.items()})
        state["step"] += 1
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        h = update_rules.adamw(state["step"], **options)
        g = update_rules.gradient(h, grad, param).reshape(rows, columns)
        square = g * g
        row = h.b2 * state["row"] + h.w2 * (square.sum(1) / columns)
        col = h.b2 * state["col"] + h.w2 * (square.sum(0) / rows)
        share = ratio(row, row.mean())
        m = h.first_moment(g, state["exp_avg"])
        key = Key(site=number, step=state["step"])
        stored = through(self.form, m, lloyd_max.root(share), lloyd_max.root(col), key)
        p = param.reshape(rows, columns)
        if self.form.residual:
            root = lloyd_max.root(share).unsqueeze(1) * lloyd_max.root(col)
            new = h.update_with_residual(p, m, stored, root)
        else:
            new, _ = h.update(p, g, [state["exp_avg"], share.unsqueeze(1) * col], factored=True)
        param.copy_(new.view(shape))
        state.update(exp_avg=stored, row=row, col=col)

    def payload_bytes(self) -> float:
        """Of all states, as they would be kept."""
        found = float(state_bytes(self.others))
        for param in self.state:
            lines = param.shape[0] + param.shape[1:].numel()
            own = self.form.bytes * param.numel() + self.form.bytes_per_line * lines
            found += own + 4 * lines  # and the factors
        return found


def is_coded(param: Tensor) -> bool:
    """Whether a parameter has a factored second moment beside a coded first one."""
    large = param.dim() > 1 and param.numel() > layout.MIN_ELEMENTS
    return large and isinstance(Factored().for_shape(param.shape)[0], Factored)


def through(form: Form, m: Tensor, row: Tensor, col: Tensor, key: Key) -> Tensor:
    """A moment [rows, columns] as it comes back, given roots of the second one's factors."""
    given = m
    if form.over_factors:
        given = m * inverse(row).unsqueeze(1) * inverse(col)
    top = top_pairs(given, form.top, key) if form.top else torch.zeros_like(given)
    rest = given - top
    size = grid(rest) if form.over_grid else torch.ones_like(rest)
    coded = form.code(bitpack.blocks(_over(rest, size), BLOCK), key)
    back = top + size * coded.reshape(-1)[: m.numel()].view_as(m)
    return back * (row.unsqueeze(1) * col) if form.over_factors else back
