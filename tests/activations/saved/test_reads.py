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


def with_and_without(model, x):
    """The gradient of the first weight without memtrain and with it, and the plan's entries."""
    (exact,) = torch.autograd.grad(model(x).sum(), model.first.weight)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    (mine,) = torch.autograd.grad(model(x).sum(), model.first.weight)
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
    model, x = Attention(), nn.Parameter(torch.randn(64, 64), requires_grad=False)
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


TWO = nn.Parameter(torch.tensor([1.0, 0.5]))
WEIGHT = nn.Parameter(torch.ones(64, 64).tril(), requires_grad=False)
SQUARES = {
    **{"**": lambda h: h**2, "square": torch.square, "*": lambda h: h * h},
    "two differences": lambda h: (h - 0.1) * (h - 0.1),
    "two distances": lambda h: (h - 0.1).abs() * (h - 0.1).abs(),
    "a tensor and its view": lambda h: h * h.view(64, 64),
    "a tensor and its copy": lambda h: h.clone() * copied(h),
}
PRODUCTS = {
    "two tensors": lambda h: h.abs() * h.abs().roll(1, 1),
    "a tensor and itself without a gradient": lambda h: h * h.detach(),
    "a matrix product": lambda h: (
        h.abs().view(64, 16, 4) @ h.abs().roll(1, 0).view(64, 4, 16)
    ).reshape(64, 256)[:, ::4],
}
SMALL = {
    "a root": lambda s: (s + 1e-6).sqrt(),
    "a root without a sum": torch.rsqrt,
    "a logarithm of a view": lambda s: s.view(-1).log(),
    "a logarithm of two": lambda s: s.view(64, 32, 2).sum(-1).log(),
    "a root of a scaled mean of four": lambda s: (3 * s.view(64, 16, 4).mean(-1)).sqrt(),
    "a quotient": lambda s: 1 / s,
    "a logarithm of chosen elements": lambda s: torch.log(s @ torch.eye(64)),
    "a logarithm of pools of two": lambda s: F.avg_pool1d(s.unsqueeze(1), 2).log(),
    "a logarithm of means of four": lambda s: F.adaptive_avg_pool1d(s.unsqueeze(1), 16).log(),
    "a logarithm of a product with two": lambda s: (s.view(-1, 2) @ TWO[:, None]).log(),
    "a logarithm of a sum and a product": lambda s: torch.addmm(s, WEIGHT, WEIGHT.T).log(),
    "a logarithm of a convolution": lambda s: F.conv1d(s.unsqueeze(1), TWO.view(1, 1, 2)).log(),
    "a logarithm of a transposed convolution": lambda s: F.conv_transpose1d(
        s.unsqueeze(1), TWO.view(1, 1, 2), stride=2
    ).log(),
}
LARGE = {
    "a pool of sixteen": lambda s: F.avg_pool2d(s.view(1, 64, 8, 8), 4).log(),
    "a convolution with eight": lambda s: F.conv1d(s.view(64, 1, 64), WEIGHT[63].view(8, 1, 8)),
    "a mean": lambda s: s.mean(-1).rsqrt(),
    "a sum of eight": lambda s: s.view(64, 8, 8).sum(-1).log(),
    "a product": lambda s: s @ WEIGHT,
}


@pytest.mark.parametrize("product", [*SQUARES, *PRODUCTS])
@pytest.mark.parametrize("reader", [*SMALL, *LARGE])
def test_a_product_that_a_root_or_a_logarithm_reads_keeps_its_factors(product, reader):
    torch.manual_seed(0)
    model = Model(lambda h: {**SMALL, **LARGE}[reader]({**SQUARES, **PRODUCTS}[product](h)))
    exact, mine, _ = with_and_without(model, torch.randn(64, 64))
    assert torch.equal(mine, exact) is (reader in SMALL)
    assert torch.cosine_similarity(mine, exact, 0) > 0.98


NORMS = {
    "layer_norm": lambda s, n: F.layer_norm(s.view(-1, n), (n,)),
    "rms_norm": lambda s, n: F.rms_norm(s.view(-1, n), (n,)),
    "group_norm": lambda s, n: F.group_norm(s.view(16, -1, n), s.numel() // 16 // n),
    "batch_norm": lambda s, n: F.batch_norm(s.view(n, -1), None, None, training=True),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [4, 16])
def test_a_product_that_a_norm_of_few_elements_reads_keeps_its_factors(norm, size):
    model = Model(lambda h: NORMS[norm](h * h.roll(1, 0), size).view(-1) * torch.arange(4096))
    _, _, entries = with_and_without(model, torch.randn(64, 64))
    kept = {e.compressor == "" for e in entries if " / mul / " in e.site and e.nbytes}
    assert kept == {size == 4}


def scan(h):
    """A state-space model's states, with a decay that depends on the input."""
    decay, state, read = torch.exp(-h.abs() * 0.1), torch.zeros(64, 16), []
    for part in range(0, 64, 16):
        state = decay[:, part : part + 16] * state + h[:, part : part + 16]
        read.append(state @ WEIGHT[:16, :16])
    return torch.stack(read)


FOLLOWED = {
    "two experts": lambda h: (h.view(32, 2, 64) * h.sigmoid().view(32, 2, 64)).sum(1) @ WEIGHT,
    "index_add": lambda h: (
        torch.zeros(32, 64).index_add(0, torch.arange(64) % 32, h * h.abs()) @ WEIGHT
    ),
    "the largest": lambda h: (h @ h.T / 64).sub((h @ h.T / 64).amax(-1, True)).softmax(-1) @ WEIGHT,
    "a scan": scan,
}


@pytest.mark.parametrize("op", FOLLOWED)
def test_factors_are_compressed_where_products_read_what_is_made_of_them(op):
    exact, mine, entries = with_and_without(Model(FOLLOWED[op]), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.9
    factors = [e for e in entries if "/ mul /" in e.site or "/ matmul /" in e.site]
    assert sum(e.planned for e in factors) < 0.2 * sum(e.nbytes for e in factors)


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
    "a convolution": lambda s, v: F.conv1d((s * v)[None], torch.ones(8, 64, 3)),
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


def test_the_result_of_exp_is_kept_if_a_logarithm_reads_a_sum_of_its_products():
    """The likelihood of a mixture of normal distributions."""
    torch.manual_seed(0)

    def likelihood(h):
        h = h.view(512, 8)
        densities = torch.exp(-0.5 * (9 * h[:, :4] - torch.linspace(-2, 2, 512)[:, None]) ** 2)
        return torch.log((h[:, 4:].softmax(-1) * densities).sum(-1) + 1e-12)

    exact, mine, _ = with_and_without(Model(likelihood), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.999


def normal(h):
    """Minus the log-density of normal distributions, given a factor of each covariance."""
    factor = h.view(16, 16, 16).tril()
    covariance = factor @ factor.mT + 1e-2 * torch.eye(16)
    x = torch.linspace(-1, 1, 16).expand(16, 16).unsqueeze(-1)
    return torch.logdet(covariance) + (x.mT @ torch.linalg.solve(covariance, x)).flatten()


def discretized(h):
    """The log-likelihood of a mixture of logistic distributions in a bin of 1/128."""
    h = h.view(256, 16)
    mean, weights = h[:, :5], h[:, 5:10].softmax(-1)
    scale = torch.exp(-2 - h[:, 10:15])
    x = torch.linspace(-1, 1, 256)[:, None] - mean
    bins = torch.sigmoid((x + 1 / 256) / scale) - torch.sigmoid((x - 1 / 256) / scale)
    return torch.log((weights * bins).sum(-1) + 1e-12)


def mixture(h):
    """The log-likelihood of a mixture of normal distributions."""
    h, x = 2 * h.view(256, 16), torch.linspace(-1, 1, 256)[:, None]
    z = (x - h[:, :5]) * torch.exp(-h[:, 5:10])
    return torch.logsumexp(h[:, 10:15] - h[:, 5:10] - 0.5 * z**2, -1)


DENSITIES = {
    "mixture": mixture,
    "sum of kernels": lambda h: torch.log(torch.exp(-0.5 * (4 * h) ** 2).mean(-1) + 1e-9),
    "minus a square": lambda h: torch.softmax(-((4 * h) ** 2), -1).view(-1)[::7],
    "normal": normal,
    "discretized": discretized,
    "mixture by bmm": lambda h: torch.log(
        torch.bmm(h[:, :4].softmax(-1)[:, None], h[:, 4:].view(64, 4, 15).softmax(-1))[:, 0, :3]
    ),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_a_density_has_the_gradient_of_the_baseline(name):
    torch.manual_seed(0)
    exact, mine, _ = with_and_without(Model(DENSITIES[name]), torch.randn(64, 64))
    assert torch.cosine_similarity(mine, exact, 0) > 0.99


WAITING = {
    "sigmoid": (torch.sigmoid, (), "result"),
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
    model = Attention()
    given = model, torch.optim.SGD(model.parameters()), torch.randn(4, 64, 64), "activations_only"
    assert predict(*given).peak.nbytes == measure(*given).peak.nbytes


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
