"""Classes that are masked (-inf, -1e9) leave the gradients of the others as they are."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain import wrap
from memtrain.compressors.log_group import SPAN

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]
ROWS, CLASSES = 128, 96
LOSSES = {
    "cross_entropy": F.cross_entropy,
    "weighted": lambda x, y: F.cross_entropy(x, y, torch.ones(CLASSES)),
    "log_softmax": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "logsumexp": lambda x, y: x.logsumexp(-1).square().mean(),
    "categorical": lambda x, y: -torch.distributions.Categorical(logits=x).log_prob(y).mean(),
}

ROW_SUMS = ("logsumexp", "categorical")


class Policy(nn.Module):
    def __init__(self, name, fill):
        super().__init__()
        self.head, self.loss, self.fill = nn.Linear(48, CLASSES), LOSSES[name], fill
        generator = torch.Generator().manual_seed(1)
        masked = torch.rand(ROWS, CLASSES, generator=generator) < 0.2
        self.register_buffer("masked", masked)
        masked[:, 0] = False

    def forward(self, x, y):
        return self.loss(self.head(x).masked_fill(self.masked, self.fill), y)


def given():
    torch.manual_seed(0)
    return 2 * torch.randn(ROWS, 48), torch.zeros(ROWS, dtype=torch.long)


def gradient(name, fill, preset, compiled):
    x, y = given()
    model = Policy(name, fill)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    if preset is not None:
        run, _ = wrap(run, torch.optim.SGD(model.parameters(), lr=0.1), preset)
    grads = []
    for _ in range(3):  # cached decisions, too
        model.zero_grad()
        run(x, y).backward()
        grads.append(model.head.weight.grad.clone())
    return torch.stack(grads)


def narrowest():
    """The least range of a group of 256 logarithms, none of which is masked."""
    logits = Policy("cross_entropy", 0.0).head(given()[0])
    groups = logits.log_softmax(-1).reshape(-1, 256)
    return (groups.amax(1) - groups.amin(1)).min().item()


@pytest.mark.parametrize(
    ("name", "compiled"),
    # Of a compiled logsumexp no one knows the rows.
    [
        pytest.param(name, how, marks=[pytest.mark.nightly] * (how and name != "cross_entropy"))
        for how in (False, True)
        for name in LOSSES
        if not how or name not in ROW_SUMS
    ],
)
def test_gradients_err_no_more_than_without_a_mask(name, compiled):
    def error(fill, preset):
        exact = gradient(name, fill, None, compiled=False)
        return ((gradient(name, fill, preset, compiled) - exact).norm() / exact.norm()).item()

    # Steps, and so errors, are in proportion to a group's range.
    most = SPAN / narrowest() * error(0.0, "balanced")
    for fill in (-math.inf, -1e9, -1e4):
        assert error(fill, "balanced") <= most  # logsumexp is exact


def with_and_without(model, compiled, *inputs):
    """The gradient of the head under `balanced`, compiled or not, and the exact one."""
    model(*inputs).backward()
    exact = model.head.weight.grad.clone()
    model.zero_grad()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run, _ = wrap(run, torch.optim.SGD(model.parameters(), lr=0.1), "balanced")
    run(*inputs).backward()
    return model.head.weight.grad, exact


class Levels(nn.Module):
    """Rows of very different size: logsumexp's backward reads only the differences within a row."""

    def __init__(self, dim):
        super().__init__()
        self.head, self.dim = nn.Linear(48, 64), dim

    def forward(self, x, levels):
        return (self.head(x) + levels).logsumexp(self.dim).mean()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dim", [0, 1, (0,), (0, 1), -1])
def test_rows_of_different_size_do_not_cut_each_other(dim, compiled):
    torch.manual_seed(0)
    x, levels = torch.randn(ROWS, 48), 30.0 * torch.arange(ROWS)[:, None]
    levels = levels if dim in (1, -1) else levels[:64].T
    found, exact = with_and_without(Levels(dim), compiled, x, levels)
    # A group's range is at most 4 rows of 30, or all 64 columns; a step is a 255th of that. exp()
    # of an error is as wrong as that is long; what is cut by another row's largest is without end.
    step = 30 * 64 / 255
    assert (found - exact).norm() < math.exp(step) * exact.norm()


class Twice(nn.Module):
    """Reads log-probabilities for their values, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x):
        y = (60 * self.head(x)).log_softmax(-1)
        return (y * y).mean()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_reads_the_values_themselves_has_them_whole(compiled):
    torch.manual_seed(0)
    found, exact = with_and_without(Twice(), compiled, torch.randn(ROWS, 48))
    # 4-bit groups err by 0.17 (tests/activations/test_attention_masks.py); cut, by 0.8
    assert (found - exact).norm() < 0.2 * exact.norm()


def written(h, mask, value):
    h = h.clone()
    h[mask] = value
    return h


APPLIED = {
    "masked_fill": lambda h, mask, value: h.masked_fill(mask, value),
    "masked_fill_": lambda h, mask, value: (h * 1).masked_fill_(mask, value),
    "a transposed fill": lambda h, mask, value: h.T.masked_fill(mask.T, value).T,
    "where": lambda h, mask, value: torch.where(mask, value, h).view(4, 16, 64).view(64, 64),
    "a sum": lambda h, mask, value: h + mask * value,
    "a difference": lambda h, mask, value: h - mask * -value,
    "a sum in place": lambda h, mask, value: (h * 1).add_(mask * value),
    "a sum in a product": lambda h, mask, value: torch.baddbmm(
        (mask * value)[None], h[None], torch.eye(64)[None]
    )[0],
    "a scaled sum": lambda h, mask, value: (2 * h + mask * value) / 2,
    "an assignment": written,
    "index_fill": lambda h, mask, value: h.index_fill(1, torch.arange(50, 64), value),
    "scatter": lambda h, mask, value: h.scatter(1, torch.full((64, 4), 60), value),
    "a pad": lambda h, mask, value: F.pad(h[:, :60], (0, 4), value=value),
    "cat": lambda h, mask, value: torch.cat([h[:, :60], torch.full((64, 4), value)], 1),
    "stack": lambda h, mask, value: torch.stack(
        [h[:, :32], torch.full((64, 32), value)], 2
    ).flatten(1),
    "a maximum": lambda h, mask, value: torch.maximum(h, torch.full((64, 64), -9.0)) + mask * value,
    "a fill behind a sum": lambda h, mask, value: h.masked_fill(mask, value) + h,
    "a fill in a product": lambda h, mask, value: torch.addmm(h.masked_fill(mask, value), h, h),
    "a fill behind products": lambda h, mask, value: math.prod(
        [h.masked_fill(mask, value), *[1.1] * 8]
    ),
    "a fill behind a sort": lambda h, mask, value: h.masked_fill(mask, value).sort(-1)[0],
    "a leaky fill": lambda h, mask, value: F.leaky_relu(h.masked_fill(mask, value)),
}
WEIGHT = nn.Parameter(torch.rand(64, 64))
NORMALIZED = {
    "softmax": lambda h: h.softmax(1)[:, 0].mean(),
    "log_softmax": lambda h: h.log_softmax(1)[:, 0].mean(),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(64, dtype=torch.long)),
    "logsumexp": lambda h: h.logsumexp(1).mean() - h[:, 0].mean(),
    "an exponential": lambda h: (h.exp()[:, 0] / h.exp().sum(1)).mean(),
    "squares": lambda h: F.linear(h.square().tril(), WEIGHT).mean(),
}


def gradient_of(model, run, x, value):
    return torch.autograd.grad(run(x, value), model.temperature)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("normalized", NORMALIZED)
@pytest.mark.parametrize("applied", APPLIED)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_learned_temperature_of_masked_scores_has_its_gradient(applied, normalized, compiled):
    """It adds up all scores times probabilities, which are 0 where a score is masked."""

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.temperature = nn.Linear(64, 64), nn.Parameter(torch.rand(64) + 1)

        def forward(self, x, value):
            mask = torch.ones(64, 64, dtype=torch.bool).triu(1)
            h = APPLIED[applied](self.first(x), mask, value)
            return NORMALIZED[normalized](h * self.temperature)

    torch.manual_seed(0)
    model, x = Scores(), torch.randn(64, 64)
    exact = [gradient_of(model, model, x, value) for value in (-1e9, -1e4)]
    cfg = ["preset=activations_only", "activations.min_elements=0"]
    model, _ = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    run = torch.compile(model, backend="aot_eager_decomp_partition") if compiled else model
    for value, found in zip((-1e9, -1e4), exact, strict=True):
        error = gradient_of(model, run, x, value) - found
        assert error.norm() <= 0.05 * found.norm()
