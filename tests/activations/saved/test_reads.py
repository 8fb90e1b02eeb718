"""A forward reads no saved tensor once hooks are on it: each such read is a decompression."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.activations.saved.store import Entry
from tests.activations.proof.comparison import in_thread

OPS = {
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(4, 1, 16, 64)] * 3),
    "conv2d": lambda h: F.conv2d(h.view(4, 4, 16, 16), torch.ones(4, 4, 3, 3)),
    "gather": lambda h: h.gather(1, torch.zeros(64, 32, dtype=torch.long)),
    "matmul": lambda h: h @ h.mT,
    "max_pool2d": lambda h: torch.ops.aten.max_pool2d.default(h.view(4, 4, 16, 16), [2, 2]),
    "nll_loss": lambda h: F.nll_loss(h.log_softmax(1), torch.zeros(64, dtype=torch.long)),
    "softmax": lambda h: h.softmax(1) * h,
}


class Model(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.first, self.op = nn.Linear(64, 64), op

    def forward(self, x):
        return self.op(self.first(x)) + 0


@pytest.mark.parametrize("op", OPS)
def test_a_forward_decompresses_nothing(op, monkeypatch):
    read, reads = Entry.read, []
    monkeypatch.setattr(Entry, "read", lambda *args: reads.append(1) or read(*args))
    model = Model(OPS[op])
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "activations_only")
    for _ in range(2):
        loss = model(torch.randn(64, 64)).sum()
        assert not reads
        loss.backward()
        reads.clear()


def copied(p):
    return p.to(torch.float64).to(torch.float32)


BEHIND = {
    "the softmax": lambda p: p,
    "a dropout": lambda p: F.dropout(p, 0.5),
    "a dropout in place": lambda p: F.dropout(p.clone(), 0.5, inplace=True),
    "a dropout written out": lambda p: p * (torch.rand_like(p.detach()) > 0.1),
    "a cast": copied,
    "a view of a copy": lambda p: copied(p).view(64, 8, 8).view(64, 64),
}


CASES = [
    *((behind, order, False) for behind in BEHIND for order in ("product first", "copy last")),
    *((behind, "product first", True) for behind in ("the softmax", "a dropout")),
    ("the softmax", "logarithm first", False),
]


@pytest.mark.parametrize(("behind", "order", "checkpointed"), CASES)
def test_a_softmax_that_a_logarithm_reads_too_is_kept(behind, order, checkpointed):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(64, 64)

        def forward(self, x):
            p = torch.softmax(3 * self.scores(x), -1)
            y = (p @ x).sum() if order == "copy last" else 0.0
            p = BEHIND[behind](p)
            y = y + (p @ x).sum() if order == "product first" else y
            z = checkpoint(logarithm, p, use_reentrant=False) if checkpointed else logarithm(p)
            return y + z.mean() + ((p @ x).sum() if order == "logarithm first" else 0.0)

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(64, 64)
    state = torch.get_rng_state()
    model(x).backward()
    exact = model.scores.weight.grad.clone()
    model.zero_grad()
    cfg = ["preset=activations_only", "activations.min_elements=0"]
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    torch.set_rng_state(state)
    model(x).backward()
    assert torch.equal(model.scores.weight.grad, exact)


def logarithm(p):
    return torch.log(p + 1e-6)


LATE = {
    "an attribute": lambda p: p,
    "an attribute's view": lambda p: p.view(-1)[:2048],
    "an attribute's dropout": lambda p: F.dropout(p, 0.5),
}
ELSEWHERE = {
    "a logarithm": lambda p: in_thread(logarithm, p),
    "a root": lambda p: in_thread(torch.sqrt, p * 1),
    "a root of a copy": lambda p: in_thread(torch.sqrt, copied(p)),
}


@pytest.mark.parametrize("name", [*LATE, *ELSEWHERE])
@pytest.mark.parametrize("form", [torch.softmax, lambda x, dim: torch.exp(x)])
def test_a_result_that_is_read_where_no_mode_sees_it_is_kept(name, form):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(64, 64)

        def forward(self, x):
            p = form(3 * self.scores(x), -1)
            if name in ELSEWHERE:
                return p @ x + ELSEWHERE[name](p).sum()
            self.weights = LATE[name](p)
            return (p if self.weights.dim() == 1 else self.weights) @ x

    def gradient(model):
        torch.manual_seed(1)
        y = model(torch.randn(64, 64)).sum()
        loss = y if name in ELSEWHERE else y + logarithm(model.weights).mean()
        return torch.autograd.grad(loss, model.scores.weight)[0]

    torch.manual_seed(0)
    model = Attention()
    exact = gradient(model)
    model.weights = None
    cfg = ["preset=activations_only", "activations.min_elements=0"]
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    assert torch.equal(gradient(model), exact)


SQUARES = {"**": lambda h: h**2, "square": torch.square, "*": lambda h: h * h}
SMALL = {
    "a root": lambda s: (s + 1e-6).sqrt(),
    "a root without a sum": torch.rsqrt,
    "a logarithm of a view": lambda s: s.view(-1).log(),
    "a logarithm of two": lambda s: s.view(64, 32, 2).sum(-1).log(),
    "a root of a scaled mean of four": lambda s: (3 * s.view(64, 16, 4).mean(-1)).sqrt(),
    "a quotient": lambda s: 1 / s,
}
LARGE = {
    "a mean": lambda s: s.mean(-1).rsqrt(),
    "a sum of eight": lambda s: s.view(64, 8, 8).sum(-1).log(),
    "a product": lambda s: s @ torch.ones(64, 64),
}


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("reader", [*SMALL, *LARGE])
def test_a_square_that_a_root_or_a_logarithm_reads_keeps_its_factor(square, reader):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x):
            return ({**SMALL, **LARGE}[reader](SQUARES[square](self.first(x)))).sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 64)
    (exact,) = torch.autograd.grad(model(x), model.first.weight)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    (mine,) = torch.autograd.grad(model(x), model.first.weight)
    assert torch.equal(mine, exact) is (reader in SMALL)
    assert torch.cosine_similarity(mine.flatten(), exact.flatten(), 0) > 0.98


WAITING = {
    "softmax": (torch.softmax, (-1,), "result"),
    "exp": (torch.exp, (), "result"),
    "pow": (torch.pow, (2,), "factor"),
}


@pytest.mark.parametrize("op", WAITING)
def test_what_waits_for_its_readers_and_is_changed_meanwhile_raises_as_the_baseline_does(op):
    function, args, saved = WAITING[op]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x):
            h = self.first(x)
            y = function(h, *args)
            with torch.no_grad():
                (h if saved == "factor" else y).mul_(0.5)
            return (y @ torch.ones(64, 64)).sum()

    model, x = Model(), torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).backward()
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).backward()


def test_the_dropout_of_attention_is_saved_in_bits():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x):
            q, k, v = self.qkv(x).view(4, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum()

    torch.manual_seed(0)
    model = Attention()
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    model(torch.randn(4, 64, 64)).backward()
    (entry,) = (
        entry
        for entry in memtrain.plan_of(model).entries("activation")
        if entry.site.endswith("scaled_dot_product_attention / saved")
    )
    scores, inputs = 4 * 4 * 64 * 64, 3 * 4 * 64 * 64
    group = 4 + 32 / 128  # bits per element, with two bounds in bfloat16 per group
    assert entry.planned == pytest.approx(
        (scores * (2 * group + 1) + inputs * group) / 8, rel=0.001
    )
