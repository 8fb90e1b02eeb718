"""A forward reads no saved tensor once hooks are on it: each such read is a decompression."""

from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.activations.saved.handles import MaskBias
from memtrain.activations.saved.store import Entry
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
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


def with_and_without(model, x, cfg="activations_only", run=lambda model: model):
    """The gradient of the first weight without memtrain and with it, and the plan's entries."""
    (exact,) = torch.autograd.grad(model(x).sum(), model.first.weight)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    (mine,) = torch.autograd.grad(run(model)(x).sum(), model.first.weight)
    return exact.flatten(), mine.flatten(), memtrain.plan_of(model).entries("activation")


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
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(64, 64), requires_grad=False)

    def attention(scores):
        torch.manual_seed(1)
        p = torch.softmax(3 * scores, -1)
        y = (p @ x).sum() if order == "copy last" else 0.0
        p = BEHIND[behind](p)
        y = y + (p @ x).sum() if order == "product first" else y
        z = checkpoint(logarithm, p, use_reentrant=False) if checkpointed else logarithm(p)
        return y + z.mean() + ((p @ x).sum() if order == "logarithm first" else 0.0)

    cfg = ["preset=activations_only", "activations.min_elements=0"]
    exact, mine, _ = with_and_without(Model(attention), x, cfg)
    assert torch.equal(mine, exact)


def logarithm(p):
    return torch.log(p + 1e-6)


def assigned(p):
    copy = torch.zeros(64, 64)
    copy[:, 1:] = p[:, 1:]
    return copy


LATE = {
    "an attribute": lambda p: p,
    "an attribute's view": lambda p: p.view(-1)[:2048],
    "an attribute's dropout": lambda p: F.dropout(p, 0.5),
    "an attribute's slice": assigned,
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
            return (self.weights if name == "an attribute's dropout" else p) @ x

    def gradient(model):
        torch.manual_seed(1)
        y = model(nn.Parameter(torch.randn(64, 64), requires_grad=False)).sum()
        loss = y if name in ELSEWHERE else y + logarithm(model.weights).mean()
        return torch.autograd.grad(loss, model.scores.weight)[0]

    torch.manual_seed(0)
    model = Attention()
    exact = gradient(model)
    model.weights = None
    cfg = ["preset=activations_only", "activations.min_elements=0"]
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    assert torch.equal(gradient(model), exact)


WEIGHT = nn.Parameter(torch.ones(64, 64).tril(), requires_grad=False)
GATES = {"sigmoid": torch.sigmoid, "tanh": lambda h: 0.5 + 0.49 * torch.tanh(h)}
UNBOUNDED = {
    "a logarithm": lambda s, v: torch.log(s + 1e-6),
    "a logarithm of what is left": lambda s, v: torch.log(1 - s),
    "a logarithm of a product": lambda s, v: torch.log(s * v.exp()),
    "a logarithm of two gates": lambda s, v: torch.log(s * torch.sigmoid(v)),
    "a logarithm behind a product": lambda s, v: (s @ WEIGHT) + torch.log(s),
    "a quotient": lambda s, v: v / (s + 0.01),
    "cross-entropy of one": lambda s, v: F.binary_cross_entropy(s, torch.ones(64, 64)),
    "a logarithm of chosen elements": lambda s, v: torch.log(s[None] @ torch.eye(64)[None]),
    "a thread": lambda s, v: s @ WEIGHT + in_thread(torch.log, s * 1).sum(),
}
BOUNDED = {
    "a product": lambda s, v: (s * v) @ WEIGHT,
    "two gates": lambda s, v: (s * torch.tanh(v)) @ WEIGHT,
    "a softmax": lambda s, v: (20 * s + torch.ones(64, 64).triu(1) * -1e9).softmax(-1) @ v,
    "a log-softmax": lambda s, v: F.log_softmax(4 * s, -1)[:, 0],
    "cross-entropy of many": lambda s, v: F.cross_entropy(30 * s, torch.arange(64)),
    "a convolution": lambda s, v: F.conv1d((s * v).view(1, 64, 64), WEIGHT.view(64, 64, 1)),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("reader", [*UNBOUNDED, *BOUNDED])
def test_a_gate_is_kept_if_an_op_with_an_unbounded_gradient_reads_it(gate, reader):
    torch.manual_seed(0)
    model = Model(lambda h: {**UNBOUNDED, **BOUNDED}[reader](GATES[gate](5 * h), h.roll(1, 1)))
    exact, mine, entries = with_and_without(model, torch.randn(64, 64))
    payloads = {entry.compressor for entry in entries if entry.site.endswith(f"{gate} / input")}
    is_kept = "" in payloads or torch.equal(mine, exact)  # after a compression, or at once
    assert is_kept is (reader in UNBOUNDED)
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


WAITING = {
    "sigmoid": (torch.sigmoid, (), "result"),
    "softmax": (torch.softmax, (-1,), "result"),
    "exp": (torch.exp, (), "result"),
    "pow": (torch.pow, (2,), "factor"),
}


@pytest.mark.parametrize("op", WAITING)
def test_what_waits_for_its_readers_and_is_changed_meanwhile_raises_as_the_baseline_does(op):
    function, args, saved = WAITING[op]

    def changed(h):
        y = function(h, *args)
        with torch.no_grad():
            (h if saved == "factor" else y).mul_(0.5)
        return y @ torch.ones(64, 64)

    model, x = Model(changed), torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).sum().backward()
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(x).sum().backward()


def test_the_dropout_of_attention_is_saved_in_bits():
    def attend(h):
        q, k, v = h.view(4, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum()

    model, x = Model(attend), torch.randn(4, 64, 64)
    model.first = nn.Linear(64, 192)
    given = model, torch.optim.SGD(model.parameters()), x, "activations_only"
    assert predict(*given).peak.nbytes == measure(*given).peak.nbytes
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "activations_only")
    model(x).backward()
    entries = memtrain.plan_of(model).entries("activation")
    (entry,) = (e for e in entries if e.site.endswith("scaled_dot_product_attention / saved"))
    scores, inputs = 4 * 4 * 64 * 64, 3 * 4 * 64 * 64
    group = 4 + 32 / 128  # bits per element, with two bounds in bfloat16 per group
    assert entry.planned == pytest.approx(
        (scores * (2 * group + 1) + inputs * group) / 8, rel=0.001
    )


@pytest.mark.parametrize(
    ("numbers", "same"),
    [
        ([0.0, 1.25], True),
        ([0.0, -inf], True),
        ([-0.0, 0.5, 0.0], True),
        ([0.0, 0.0], True),
        ([3.0, 3.0], True),
        ([0.0, 1.25, 1.5], False),
        ([0.0, -1.0, 1.0], False),
        ([0.0, nan], False),
    ],
)
@pytest.mark.parametrize("expanded", [False, True])
def test_a_mask_equals_what_its_bits_give_back(numbers, same, expanded):
    x = torch.tensor(numbers).repeat(24)
    x = x.view(1, -1).expand(8, -1) if expanded else x
    mask = MaskBias(x)
    assert mask.equals(x) == same == torch.equal(mask.unpack(), x)


def test_a_scan_is_visited_in_time_that_grows_with_its_steps():
    def scan(h):
        decay, state = torch.sigmoid(h), h[0] * 0
        for row in decay:  # each state has the elements of all gates before, in two ways
            state = row * state + row
        return state @ WEIGHT

    torch.manual_seed(0)
    exact, mine, _ = with_and_without(Model(scan), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.99
