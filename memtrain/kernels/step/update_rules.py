"""One rule per optimizer: the scalars of its step, and its update.

Each rule has three implementations: PyTorch (this file, with the formula), Triton
(`update_rules_triton.py`) and C++ (cpu/step/rules.h).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

COUNT = 16  # places for the scalars of a step: a cache line
_NONE = (0.0,) * COUNT


class AdamWScalars(NamedTuple):
    r"""The step scalars of AdamW and Adam, with bias correction folded in; `adamw` makes them.

    With the gradient $g_t$ (Adam: $g_t + \lambda \theta_{t-1}$), and states $m_0 = v_0 = 0$:

    $$m_t = m_{t-1} + (1 - \beta_1) (g_t - m_{t-1})$$
    $$v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$$
    $$\theta_t = (1 - \eta \lambda) \theta_{t-1} - \frac{\eta}{1 - \beta_1^t} m_t \Big/ \Big(
      \sqrt{v_t / (1 - \beta_2^t)} + \epsilon \Big)$$

    With $c = \sqrt{1 - \beta_2^t}$ the quotient is $\frac{\eta c}{1 - \beta_1^t} m_t / (\sqrt{v_t}
    + c \epsilon)$: one division an element fewer. A factored second moment keeps the means $r$ of
    the rows and $k$ of the columns of $v$: they follow those of $g_t^2$ as $v$ does, and
    $v_{ij} = r_i k_j / \bar r$.

    Where quantising $m_t$ leaves $\hat m_t$ (2 bits), its residual $e = m_t - \hat m_t$ is not
    there in later steps: what it would have given to the weight in them, at this step's learning
    rate and denominator, is given at once, $\eta e \sum_{k \ge 1} \beta_1^k / (1 -
    \beta_1^{t+k})$ in place of $\eta m_t / (1 - \beta_1^t)$. The sum is $\beta_1 / (1 - \beta_1)$
    when bias correction is over.
    """

    decay: float
    l2: float
    sign: float
    w1: float
    b2: float
    w2: float
    step_size: float
    eps: float
    residual_size: float

    states = (2,)

    def first_moment(self, g: Tensor, m: Tensor) -> Tensor:
        """The new first moment."""
        return m + self.w1 * (g - m)

    def second_moment(self, g: Tensor, v: Tensor) -> Tensor:
        """The new second moment."""
        return self.b2 * v + (self.w2 * g) * g

    def update(
        self, p: Tensor, g: Tensor, states: Sequence[Tensor], *, factored: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The new parameter and moments; `factored`: the second moment is the new one already."""
        m = self.first_moment(g, states[0])
        v = states[1] if factored else self.second_moment(g, states[1])
        return p * self.decay - (self.step_size * m) / (v.sqrt() + self.eps), [m, v]

    def update_with_residual(self, p: Tensor, m: Tensor, stored: Tensor, root: Tensor) -> Tensor:
        """The new parameter where `stored` is kept of the first moment; `root`: of the second."""
        step = self.step_size * m + self.residual_size * (m - stored)
        return p * self.decay - step / (root + self.eps)


class SGDScalars(NamedTuple):
    r"""The step scalars of SGD; `sgd` makes them.

    With the gradient $g_t$ (plus $\lambda \theta_{t-1}$), momentum $\mu$ and dampening $\tau$:

    $$b_1 = g_1, \quad b_t = \mu b_{t-1} + (1 - \tau) g_t$$
    $$\theta_t = \theta_{t-1} - \eta b_t \quad \text{(Nesterov: } \theta_{t-1} - \eta (g_t + \mu
      b_t) \text{)}$$
    """

    decay: float
    l2: float
    sign: float
    momentum: float
    w: float
    nesterov: float
    lr: float

    states = (0, 1)

    def update(self, p: Tensor, g: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The new parameter and momentum buffer."""
        b = self.momentum * (states[0] if states else torch.zeros_like(g)) + self.w * g
        return p - self.lr * (g + self.nesterov * b if self.nesterov else b), [b]


class LionScalars(NamedTuple):
    r"""The step scalars of Lion; `lion` makes them.

    $$\theta_t = (1 - \eta \lambda) \theta_{t-1} - \eta \operatorname{sign}(\beta_1 m_{t-1} +
      (1 - \beta_1) g_t)$$
    $$m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t$$

    The sign of NaN is NaN.
    """

    decay: float
    l2: float
    sign: float
    b1: float
    w1: float
    b2: float
    w2: float
    lr: float

    states = (1,)

    def update(self, p: Tensor, g: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The new parameter and momentum."""
        (m,) = states
        c = self.b1 * m + self.w1 * g
        step = torch.where(c.isnan(), c, c.sign())
        return p * self.decay - self.lr * step, [self.b2 * m + self.w2 * g]


Scalars = AdamWScalars | SGDScalars | LionScalars
RULES: dict[str, type[Scalars]] = {"adamw": AdamWScalars, "sgd": SGDScalars, "lion": LionScalars}
"""Every rule by its name, in the order of the kernels' numbers of them. Each begins with `decay`
(1 - lr * weight_decay), `l2` (weight decay in the gradient) and `sign` (-1: maximise), has
at most `COUNT` scalars, rounded to float32 in use, and says how many `states` it may keep."""


@lru_cache(maxsize=64)  # released gradients ask for each parameter
def adamw(
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = True,
) -> AdamWScalars:
    """Return the scalars of AdamW's or Adam's step, which is numbered from 1.

    Reference:
        Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
    """
    b1, b2 = betas
    correction = math.sqrt(1 - b2**step)
    return AdamWScalars(
        decay=1 - lr * weight_decay if decoupled else 1.0,
        l2=0.0 if decoupled else weight_decay,
        sign=-1.0 if maximize else 1.0,
        w1=1 - b1,
        b2=b2,
        w2=1 - b2,
        step_size=lr * correction / (1 - b1**step),
        eps=eps * correction,
        residual_size=lr * correction * later_weight(b1, step),
    )


def later_weight(b1: float, step: float) -> float:
    r"""Return the weight of a part of the first moment in all later steps, with bias correction.

    The weight is $\sum_{k \ge 1} \beta_1^k / (1 - \beta_1^{t+k})$, by the formula of Euler and
    Maclaurin: for decays from 0.5 on correct to 0.002 of it. 0 without a decay.

    Example:
        >>> round(later_weight(0.9, 1), 1), round(later_weight(0.9, 1000), 4)
        (20.1, 9.0)
    """
    if b1 <= 0:
        return 0.0
    rate, power = -math.log(b1), max(b1 ** (step + 1), 1e-30)
    integral = -math.log1p(-power) / power
    left = 1 - power
    return b1 * (integral / rate + 0.5 / left + rate / (12 * left * left))


def sgd(
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    first: bool = False,
) -> SGDScalars:
    """Return the scalars of SGD's step; the `first` buffer is the gradient, as in torch."""
    return SGDScalars(
        decay=1.0,
        l2=weight_decay,
        sign=-1.0 if maximize else 1.0,
        momentum=0.0 if first else momentum,
        w=1.0 if first else 1 - dampening,
        nesterov=momentum if nesterov else 0.0,
        lr=lr,
    )


def lion(
    *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0, maximize: bool = False
) -> LionScalars:
    """Return the scalars of Lion's step.

    Reference:
        Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675, algorithm 2.
    """
    b1, b2 = betas
    return LionScalars(
        decay=1 - lr * weight_decay,
        l2=0.0,
        sign=-1.0 if maximize else 1.0,
        b1=b1,
        w1=1 - b1,
        b2=b2,
        w2=1 - b2,
        lr=lr,
    )


def drawn(m: Tensor, p: Tensor) -> Tensor:
    """Return numbers in (0, 1) for the stochastic rounding of a new momentum: float32.

    The numbers are a hash of the magnitude of the momentum, which changes in each step, and of the
    upper 16 bits of the parameter, which differ between elements: they need no seed, and opposite
    gradients get equal numbers. The parameter's lower bits depend on the order of sums.

    With a gradient that is the same to the bit in every step, the momentum reaches a fixed point:
    its codes then change only as the parameter's upper bits do, sooner where the momentum is
    large. Its mean over time was 7 % too small at a learning rate of 0.001, to nearest 3 %.

    `p` is the parameter before the step. The numbers are `(r + 0.5) / 65536`, `r` a uniform integer
    of 16 bits.

    Example:
        >>> x = torch.rand(100_000, dtype=torch.float32)
        >>> round(drawn(x, x).mean().item(), 2)
        0.5
    """
    mask = 0xFFFFFFFF
    m, p = (x.float().contiguous().view(torch.int32).long() & 0x7FFFFFFF for x in (m, p))
    h = (m ^ p >> 16) * 0x7FEB352D & mask
    h = (h ^ h >> 15) * 0x846CA68B & mask
    return ((h >> 16).float() + 0.5) * 2.0**-16


def gradient(h: Scalars, grad: Tensor, p: Tensor) -> Tensor:
    """Return the gradient with its sign and L2 decay, in the dtype of `p`."""
    g = grad.to(p.dtype) * h.sign
    return g + h.l2 * p if h.l2 else g


def stacked_rows(scalars: Sequence[Scalars]) -> np.ndarray:
    """Return the scalars of n entries as kernels read them: float32, [n or 1, COUNT]."""
    different = {id(one): one for one in scalars}  # mostly one for all
    rows = np.array([*map(_row, different.values())])
    if len(rows) == 1:
        return rows
    positions = {kept: k for k, kept in enumerate(different)}
    return rows[[positions[id(one)] for one in scalars]]


@lru_cache(maxsize=64)
def _row(scalars: Scalars) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond float32's range: Inf, as torch has it
        return np.array((*scalars, *_NONE[len(scalars) :]), np.float32)
