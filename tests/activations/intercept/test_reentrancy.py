"""Threads, several graphs and recomputation: what shares an interception, and what must not."""

import _thread
import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.reentrancy import suspend_others
from memtrain.activations.saved.options import Options
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group
from tests.activations.intercept.intercepted import Fn, identity, intercept, lossy, stack_is_clean

CHOICES = {"identity": identity, "lossy": lossy}


@pytest.mark.parametrize("preset", CHOICES)
def test_threads_that_share_a_model_do_not_disturb_each_other(preset):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    records, errors = [], []
    intercept(model, CHOICES[preset], records)
    barrier = threading.Barrier(3)

    def work():
        try:
            barrier.wait()
            for _ in range(10):
                model(torch.randn(256, 64)).sum().backward()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert stack_is_clean()
    before, _ = saved_nbytes(lambda: model(torch.randn(256, 64)))
    assert preset == "identity" or before < 4 * 256 * 64 * 2  # and it still compresses


def test_a_forward_in_a_thread_that_python_does_not_list_goes_on():
    """As one within a backward on CUDA, in a thread of autograd's own."""
    inside, done, ended = (_thread.allocate_lock() for _ in range(3))
    states = []

    class Waits(nn.Module):
        def forward(self, x):
            if threading.get_ident() != threading.main_thread().ident:
                inside.release()
                done.acquire(timeout=10)
            return x.exp()

    def work():
        model(torch.randn(64, 64)).sum().backward()
        states.append(stack_is_clean())
        ended.release()

    model, records = nn.Sequential(nn.Linear(64, 64), Waits(), nn.Linear(64, 64)), []
    intercept(model, lossy, records)
    for lock in (inside, done, ended):
        lock.acquire()
    _thread.start_new_thread(work, ())
    assert inside.acquire(timeout=10)
    model(torch.randn(64, 64)).sum().backward()
    done.release()
    assert ended.acquire(timeout=10)
    assert states == [True]
    assert any("another thread" in record.reason for record in records)
    assert {r.site.module for r in records if r.compressor} >= {"1", "2"}


def test_a_thread_that_died_in_its_forward_leaves_the_model_to_others():
    class Ends(nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit  # which calls no hook
            return x.exp()

    model, records = nn.Sequential(nn.Linear(64, 64), Ends(), nn.Linear(64, 64)), []
    intercept(model, lossy, records)

    def work():
        with contextlib.suppress(SystemExit):
            model(torch.randn(64, 64))

    other = threading.Thread(target=work)
    other.start()
    other.join()
    model(torch.randn(64, 64)).sum().backward()
    assert stack_is_clean()
    assert {r.site.module for r in records if r.compressor} >= {"1", "2"}


def test_a_recomputation_in_the_backward_is_not_compressed():
    block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model = Fn(lambda self, x: checkpoint(self.block, x, use_reentrant=True), block=block)
    x = torch.randn(64, 64)
    grads = []
    for _ in range(2):
        y = x.clone().requires_grad_()
        model(y).square().sum().backward()
        grads.append([y.grad, *(p.grad.clone() for p in block.parameters())])
        model.zero_grad()
        intercept(model)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("first", [0, 1])
def test_a_derived_output_outlives_the_graph_that_made_it(first):
    """`y` is computed again from its norm's payload, also once the norm's backward has run."""
    norm, head, probe = nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(64, 8)
    model = Fn(
        lambda self, x: [self.head(y := self.norm(x @ self.p)), self.probe(y.detach())],
        torch.randn(64, 64),
        norm=norm,
        head=head,
        probe=probe,
    )
    x = torch.randn(64, 64)
    model(x)[1].square().sum().backward()
    plain, probe.weight.grad = probe.weight.grad, None
    intercept(model, lambda site: Group(bits=8))
    losses = [y.square().sum() for y in model(x)]
    losses[first].backward()
    losses[1 - first].backward()
    assert (probe.weight.grad - plain).norm() < 0.02 * plain.norm()


def test_gradients_asked_for_after_a_backward_that_shares_a_derived_output():
    norm, left, right = nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(64, 8)
    model = Fn(
        lambda self, x: [self.left(y := self.norm(x @ self.p)), self.right(y)],
        torch.randn(64, 64),
        norm=norm,
        left=left,
        right=right,
    )
    intercept(model)
    a, b = model(torch.randn(64, 64))
    a.sum().backward()
    (grad,) = torch.autograd.grad(b.square().sum(), [right.weight])
    assert torch.isfinite(grad).all()


def test_indices_of_an_embedding_in_either_order_of_its_arguments():
    indices = torch.randint(0, 3000, (4, 512))
    for call in (torch.embedding, lambda w, i: F.embedding(i, w)):
        model = Fn(lambda self, i, call=call: call(self.p, i + 0), torch.randn(3000, 8))
        model(indices).square().sum().backward()
        plain, model.p.grad = model.p.grad, None
        intercept(model)
        model(indices).square().sum().backward()
        assert torch.equal(model.p.grad, plain)


@pytest.mark.parametrize("choose", CHOICES)
def test_a_small_view_changed_in_place_is_refused(choose):
    def forward(self, x):
        y = x * self.p
        z = y[0, :4] * self.p[0, :4]
        y.add_(1)
        return z

    model = Fn(forward)
    intercept(model, CHOICES[choose])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(64, 64)).sum().backward()


def test_a_wrapped_model_can_be_traced_by_jit():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    intercept(model)
    x = torch.randn(64, 64)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


@pytest.mark.parametrize("whole", [True, False], ids=["model", "submodule"])
def test_a_compiled_forward_is_one_graph_and_keeps_what_its_compiler_chose(whole):
    class Own(nn.Linear):  # torch 2.11 compiles no forward of its own files by itself
        def forward(self, x):
            return super().forward(x)

    torch.compiler.reset()
    model = nn.Sequential(Own(64, 64), nn.GELU(), nn.Linear(64, 64))
    exact, x, graphs = copy.deepcopy(model), torch.randn(64, 64), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    intercept(model, identity)
    if not whole:
        model[0].compile(backend=backend)
    run = torch.compile(model, backend=backend) if whole else model
    for _ in range(2):
        run(x).sum().backward()
        exact(x).sum().backward()
    assert len(graphs) == 1
    assert torch.equal(model[0].weight.grad, exact[0].weight.grad)
    assert stack_is_clean()


def test_a_scripted_submodule_trains():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    model, x = nn.Sequential(nn.Linear(64, 64), scripted, nn.Linear(64, 64)), torch.randn(64, 64)
    model(x).square().sum().backward()
    plain = model[0].weight.grad.clone()
    model.zero_grad()
    intercept(model)
    model(x).square().sum().backward()
    assert (model[0].weight.grad - plain).norm() <= 0.2 * plain.norm()  # steps of 4 bits


def test_copies_of_data_parallel_are_refused_in_training():
    model, x = nn.Linear(32, 32), torch.randn(32, 32)
    memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    replica = model._replicate_for_data_parallel()
    vars(replica).update((name, p * 1) for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel's copies save; train with"):
        replica(x)
    with torch.no_grad():
        assert torch.equal(replica(x), model(x))
    model(x).sum().backward()  # the model itself goes on
    # Where it makes no copies, it is the model.
    nn.DataParallel(model)(x).sum().backward()


def test_torch_func_runs_inside_a_wrapped_forward():
    class PerSample(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return torch.func.grad(lambda t: self.layer(t).square().sum())(x)

    model, x = PerSample(), torch.randn(32, 32)
    model, optimizer = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "balanced")
    model(x).sum().backward()
    found = model.layer.weight.grad.clone()
    model, _ = memtrain.unwrap(model, optimizer)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(found, model.layer.weight.grad)


ROWS, WIDTH = 96, 64
LEAST = 4 * ROWS * WIDTH  # bytes that a tensor takes which is not compressed


class Saving(nn.Module):
    """Saves the exponential's result, and calls itself, or what may fail, before."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.twice = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            False,
        )

    def forward(self, x, *, again=True):
        if self.twice and again:
            with torch.no_grad():
                x = x + self(x, again=False)
        try:
            h = self.first(x)
        except ValueError:
            h = self.second(x)
        return self.second(h.exp())


def held(model):
    """Bytes that the third forward holds beside its input and the weights."""
    x = torch.randn(ROWS, WIDTH)
    for _ in range(3):
        nbytes, _ = saved_nbytes(lambda: model(x), exclude=[x, *model.parameters()])
    return nbytes


def fails(module, args):
    raise ValueError


@pytest.mark.parametrize("case", ["usual", "calls itself", "a submodule's hook raises"])
def test_what_a_model_calls_does_not_end_its_interception(case):
    model = Saving()
    model.twice = case == "calls itself"
    if case == "a submodule's hook raises":
        model.first.register_forward_pre_hook(fails)
    intercept(model)
    assert 0 < held(model) < LEAST


def test_a_forward_that_was_broken_off_is_no_call_of_itself():
    model, x = Saving(), torch.randn(ROWS, WIDTH)

    def stop(module, args):
        raise KeyboardInterrupt

    intercept(model)
    handle = model.first.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert 0 < held(model) < LEAST


def test_a_plan_that_one_thread_makes_leaves_others_forwards_alone():
    model, other = (
        Saving(),
        Interception(Saving(), lossy, options=Options(), seed=0, on_saved=list.copy),
    )
    intercept(model)
    found = []
    with suspend_others(other):
        thread = threading.Thread(target=lambda: found.append(held(model)))
        thread.start()
        thread.join()
        here = held(model)
    assert 0 < found[0] < LEAST <= here


def test_hooks_of_every_module_see_what_modules_give():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # written out in many ops

    model, x, shapes = nn.Sequential(LlamaRMSNorm(WIDTH)), torch.randn(ROWS, WIDTH), []
    intercept(model)
    plain = model(x.requires_grad_())

    def double(module, args, output):
        shapes.append(tuple(output.shape))
        return output * 2 if isinstance(module, LlamaRMSNorm) else None

    handle = register_module_forward_hook(double)
    try:
        y = model(x)
    finally:
        handle.remove()
    assert shapes == [(ROWS, WIDTH)] * 2
    torch.testing.assert_close(y, 2 * plain)


class Forces(nn.Module):
    """Returns the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        with torch.enable_grad():
            h = self.first(x).detach().requires_grad_()
            energy = (self.last(h) * F.gelu(h)).sum()
            return torch.autograd.grad(energy, h)[0]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_forward_that_computes_a_gradient_warns_that_it_is_approximate(mode):
    torch.manual_seed(0)
    model, x = getattr(Forces(), mode)(), torch.randn(64, 64)
    exact = copy.deepcopy(model)(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memtrain.wrap(model, optimizer, "exact")
    assert torch.equal(model(x), exact)
    memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    with pytest.warns(RuntimeWarning, match="the forward computes a gradient"):
        model(x)


def test_forward_mode_differentiation_inside_a_forward_is_left_alone():
    class Tangent(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            with torch.autograd.forward_ad.dual_level():
                y = F.gelu(torch.autograd.forward_ad.make_dual(h, torch.ones_like(h)))
                return torch.autograd.forward_ad.unpack_dual(y).tangent

    model, x = Tangent(64, 64), torch.randn(64, 64)
    exact = copy.deepcopy(model)(x)
    intercept(model)
    assert torch.equal(model(x), exact)


def test_an_error_of_hooks_is_not_hidden(monkeypatch):
    def fail(*args):
        raise RuntimeError("freed")

    monkeypatch.setattr(torch._C._autograd.SavedTensor, "register_hooks", fail)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, _ = memtrain.wrap(model, None, "activations_only")
    with pytest.raises(RuntimeError, match="freed"):
        model(torch.randn(64, 64))
