"""Compiled forwards: what their graphs save is compressed, under the same rules, once."""

import copy
import operator
import warnings
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import memtrain
from memtrain.activations.intercept import compiler_internals
from memtrain.compressors import COMPRESSORS, Group
from tests.activations.intercept.compiled_nets import (
    BACKEND,
    Model,
    compiled,
    gradient,
    held,
    planned,
    tokens,
    wrapped,
)

# torch's compiler looks at the gradients of what it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("fresh_compiler"),
]


WAYS = ["torch.compile", "before wrap", "model.compile", "each block", "a function"]


quick = {"torch.compile", "each block"}


@pytest.mark.parametrize(
    "how", [pytest.param(w, marks=[] if w in quick else pytest.mark.nightly) for w in WAYS]
)
def test_the_plan_reports_what_every_way_of_compiling_saves(how):
    model, x = Model(blocks=3 if how == "each block" else 1), tokens()
    plain = copy.deepcopy(model)
    expected = torch.compile(plain, backend=BACKEND)(x)
    weights = [*plain.parameters()]
    before = held(expected, x, *weights)
    expected.square().mean().backward()
    if how == "before wrap":
        run, optimizer = wrapped(torch.compile(model, backend=BACKEND))
    else:
        model, optimizer = wrapped(model)
        run = compiled(model, how)
    y = run(x)
    now, (bytes_planned, bytes_plain) = held(y, x, *model.parameters()), planned(model)
    assert now == bytes_planned
    assert now < before / 5
    if how != "each block":  # where the parts round as the whole does
        assert bytes_plain < before  # what is cheap to compute again is not saved
        assert torch.equal(y, expected)
    y.square().mean().backward()
    assert F.cosine_similarity(gradient(model), gradient(plain), dim=0) > 0.99
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2  # the plain model's, and one, also of several blocks
    for _ in range(3):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == graphs
    run, optimizer = memtrain.unwrap(run if how == "before wrap" else model, optimizer)
    again = compiled(model, how)(x) if how != "before wrap" else run(x)
    kept = held(again, x, *model.parameters())
    assert kept > 4 * now


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_graph_holds_no_more_than_the_eager_forward_and_errs_no_more(autocast):
    models, found = [Model(blocks=2) for _ in range(3)], []
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        wrapped(model)
    # inductor's decompositions, by which normalizations are pointwise ops
    decomposed = torch.compile(models[2], backend="aot_eager_decomp_partition")
    x = tokens()
    for run, model in zip([*models[:2], decomposed], models, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = run(x)
        now = held(y, x, *model.parameters()) if model is models[2] else 0
        y.float().square().mean().backward()
        found.append(gradient(model))
    (eager, _), (compiled, _) = planned(models[1]), planned(models[2])
    assert now == compiled <= 1.05 * eager
    assert (found[2] - found[0]).norm() <= (found[1] - found[0]).norm()
    reasons = {row.reason for row in memtrain.plan_of(models[2]).entries("activation")}
    assert "made of parameters and buffers alone" not in reasons  # a weight's copy is cast again


@pytest.mark.parametrize(("backend", "most"), [("aot_eager", 1 / 3), ("eager", 1 / 2)])
def test_what_a_compiled_model_saves_is_compressed_by_any_backend(backend, most):
    model, x = wrapped(Model())[0], tokens()
    model.compile(backend=backend)
    for _ in range(2):
        model(x).sum().backward()
    y = model(x)
    assert held(y, *model.parameters(), *model.buffers()) < planned(model)[1] * most


def test_the_gradient_of_a_compiled_attention_is_no_larger_for_large_logits():
    """Its log-sum-exp is that of the coded queries and keys, whose errors stay in no exponent."""
    model, x = Model(), tokens()
    with torch.no_grad():
        model.h[0].attention.qkv.weight.mul_(30)
    model(x).sum().backward()
    exact = {name: p.grad.norm() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(wrapped(model)[0], backend=BACKEND)(x).sum().backward()
    weight = "h.0.attention.qkv.weight"
    assert dict(model.named_parameters())[weight].grad.norm() < 2 * exact[weight]


@pytest.mark.nightly
def test_the_exact_twin_has_the_compiled_models_gradients():
    model, x = Model(), tokens()
    plain = copy.deepcopy(model)
    for one in (plain, wrapped(model, "exact")[0]):
        torch.compile(one, backend=BACKEND)(x).square().mean().backward()
    assert torch.equal(gradient(model), gradient(plain))


@pytest.mark.nightly
def test_plans_of_models_that_share_their_code_are_distinguished():
    x, sizes = tokens(), []
    models = [Model(), *(wrapped(Model(), preset)[0] for preset in ("balanced", "smallest"))]
    runs = [torch.compile(model, backend=BACKEND) for model in models]
    for _ in range(2):
        sizes.append(
            [held(run(x), x, *m.parameters()) for run, m in zip(runs, models, strict=True)]
        )
    assert sizes[0] == sizes[1]
    assert sizes[0] == sorted(sizes[0], reverse=True)
    assert len(set(sizes[0])) == 3


def test_graphs_compress_behind_the_last_reader_and_decompress_before_the_first():
    graphs, reuse = [], []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        reuse.append(inductor.allow_buffer_reuse)
        return boxed_nop(graph, inputs)

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    model, _ = wrapped(Model(blocks=2))
    torch.compile(model, backend=backend)(tokens()).sum().backward()
    # a buffer that waits for another tensor is alive meanwhile
    assert (*reuse, inductor.allow_buffer_reuse) == (False, False, True)
    forward, backward = [list(graph.nodes) for graph in graphs]
    ours = torch.ops.memtrain
    compressing = [n for n in forward if n.target is ours.compress_saved.default]
    assert len(compressing) > 10
    for node in compressing:
        saved = node.args[0]
        readers = [saved, *(user for user in saved.users if user not in (node, forward[-1]))]
        last = max(forward.index(reader) for reader in readers)
        between = forward[last + 1 : forward.index(node)]
        assert all(n in compressing or n.target is operator.getitem for n in between), node
    decompressing = [n for n in backward if n.target is ours.decompress_saved.default]
    for node in decompressing[1:]:  # the first one's tensor is the first that is needed
        first = min(backward.index(user) for user in node.users)
        assert all(n in decompressing for n in backward[backward.index(node) : first]), node


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.h = nn.ModuleList(copy.deepcopy(nn.Sequential(*layers)) for _ in range(4))

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return x


class Stacks(nn.Module):
    """Of equal parts that run one graph, whose backward compresses."""

    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(Stack(), Stack())

    def forward(self, x):
        return self.h(x)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [0.2, 0.0])
@pytest.mark.parametrize("how", ["torch.compile", "each block", "a function"])
def test_backwards_that_compress_round_anew_each_time_and_equally_when_resumed(how, budget):
    plain, x = Stacks(), torch.randn(256, 64)

    def start():
        torch.compiler.reset()
        model, _ = wrapped(copy.deepcopy(plain))
        return model, compiled(model, how)

    def step(model, run):
        """The gradients of two forwards, both before their two backwards, with equal weights."""
        found = []
        for y in [run(x), run(x)]:
            model.zero_grad()
            y.square().mean().backward()
            found.append(gradient(model))
        return found

    with torch._functorch.config.patch(activation_memory_budget=budget):
        first, run = start()
        before = step(first, run)
        state = copy.deepcopy(memtrain.state_dict(first))
        then = step(first, run)
        resumed, run = start()
        memtrain.load_state_dict(resumed, state)
        again = step(resumed, run)
    assert all(map(torch.equal, then, again))
    assert all(not torch.equal(a, b) for a, b in combinations(before + then, 2))


def test_rounding_differs_from_step_to_step_and_repeats_under_its_seed():
    def run():
        torch.compiler.reset()
        torch.manual_seed(0)
        model, _ = wrapped(Model())
        x, found = tokens(), []
        step = torch.compile(model, backend=BACKEND)
        for _ in range(2):
            model.zero_grad()
            step(x).square().mean().backward()
            found.append(gradient(model))
        return found

    (first, second), (again, then) = run(), run()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert torch.equal(second, then)


@pytest.mark.nightly
def test_lengths_may_change_from_call_to_call():
    model, _ = wrapped(Model())
    run = torch.compile(model, backend=BACKEND, dynamic=True)
    for length in (32, 64, 48):
        x = tokens(length)
        y = run(x)
        if length == 32:
            whole, (expected, _) = held(y, x, *model.parameters()), planned(model)
            assert whole == expected
        y.square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert held(run(x), x, *model.parameters()) > whole


class Broken(nn.Module):
    """Graphs with eager ops between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        self.c = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        x = self.b(F.gelu(self.a(x)))
        torch._dynamo.graph_break()
        x = F.silu(F.linear(x, self.c.weight))
        x = _eager(x, self.c.weight)
        return F.gelu(F.linear(x, self.c.weight))


@torch.compiler.disable
def _eager(x, weight):
    return F.gelu(F.linear(x, weight)).sin()


@pytest.mark.nightly
def test_between_graphs_nothing_is_packed_twice_and_nothing_is_missed():
    model, x = wrapped(Broken())[0], torch.randn(64, 64)
    plain = Broken()
    plain.load_state_dict(model.state_dict())
    y = torch.compile(model, backend=BACKEND)(x)
    now, (expected, whole) = held(y, x, *model.parameters()), planned(model)
    assert now == expected < whole / 4
    assert counters["stats"]["unique_graphs"] == 3
    y.square().mean().backward()
    plain(x).square().mean().backward()
    assert F.cosine_similarity(gradient(model), gradient(plain), dim=0) > 0.9


class Covariance(nn.Linear):
    """Dynamo runs `cov` between two graphs, and it saves views of what it made."""

    def forward(self, x):
        return F.gelu(super().forward(torch.cov(super().forward(x))))


def test_hooks_of_an_op_between_graphs_are_not_compiled():
    graphs = []
    for model in (Covariance(64, 64), wrapped(Covariance(64, 64))[0]):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend=BACKEND)(torch.randn(64, 64)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


class Valued(Group):
    """A compressor that looks at its input's values, and so cannot be traced."""

    def compress(self, x, *, key):
        if float(x.sum()) > 1e30:  # of a meta tensor there is none
            raise ValueError("too large")
        return super().compress(x, key=key)


def reported(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return "\n".join(str(one.message) for one in caught)


def a_step(model, optimizer, x):
    def run():
        torch.compile(model, backend=BACKEND)(x).square().mean().backward()
        optimizer.step()

    return run


@pytest.mark.nightly
def test_a_compressor_that_cannot_be_traced_is_reported(monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "valued", Valued)
    rules = [{"op": "linear", "compressor": {"name": "valued", "bits": 4}}]
    model, optimizer = wrapped(Model(), {"activations": {"exceptions": rules}})
    text = reported(a_step(model, optimizer, tokens()))
    assert "kept 256.00 KiB, its compressor has no form on tensors without data" in text


def test_another_torch_with_other_internals_is_reported(monkeypatch):
    monkeypatch.setattr(compiler_internals, "_CONTEXT", "of another torch")
    model, optimizer = wrapped(Model())
    text = reported(a_step(model, optimizer, tokens()))
    assert "whose graphs this version of torch keeps to itself" in text
