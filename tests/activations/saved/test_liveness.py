"""What is predicted of a forward is what stays alive: saves that die count nothing."""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.activations.saved.options import Options
from memtrain.activations.saved.store import Entry
from memtrain.activations.trace.fake_forward import trace
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group, Identity
from tests.activations.intercept.intercepted import intercept

OPTIONS = Options(min_elements=64)


class Branched(nn.Module):
    """A branch that nothing returned needs, and a tensor that both branches save."""

    def __init__(self):
        super().__init__()
        self.first, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        self.norm(self.unused(x).exp()).sin()
        return self.last(x)


class Buckets(nn.Module):
    """ProphetNet's relative positions: their indices are the batch's, their bound the op's."""

    def __init__(self, run, shape):
        super().__init__()
        self.run, self.table = run, nn.Parameter(torch.randn(shape))

    def forward(self, index):
        return self.run(self.table, index * 1)  # not the model's own input


def live(model, batch, choose):
    """The records of a real forward, its gradient, and the bytes that it leaves alive."""
    records = []
    interception = intercept(model, choose, records)
    nbytes, y = saved_nbytes(lambda: model(batch), exclude=[batch])
    interception.detach()
    return records, torch.autograd.grad(y.square().sum(), next(iter(model.parameters())))[0], nbytes


@pytest.mark.parametrize("choose", [lambda _: Identity(), lambda _: Group(bits=4)], ids=["8", "4"])
def test_a_branch_that_nothing_needs_counts_nothing(choose):
    model, x = Branched(), torch.randn(32, 64)
    records, _, nbytes = live(model, x, choose)
    assert sum(r.planned for r in records) == nbytes
    traced = trace(model, x, choose, OPTIONS)
    assert [r.planned for r in traced] == [r.planned for r in records]
    sites = {r.site.name: r for r in records}
    # `first`'s output is saved by both: it stays, and what only the branch saved does not.
    assert sites["unused / linear / input"].nbytes == 32 * 64 * 4
    assert sum(r.nbytes for r in records) == 32 * 64 * 4
    dead = [r for r in records if r.site.op in ("exp", "sin", "layer_norm")]
    assert len(dead) >= 3
    assert all(r.planned == r.nbytes == 0 for r in dead)


CALLS = {
    "gather": (lambda t, i: torch.gather(t, dim=1, index=i), (64, 200), (64, 40), 200),
    "index_select": (lambda t, i: t.index_select(-1, i), (4, 300), (2000,), 300),
}


@pytest.mark.parametrize("name", CALLS)
def test_indices_take_what_their_bound_needs_in_a_trace_and_live(name):
    run, shape, indices, bound = CALLS[name]
    model, index = Buckets(run, shape), torch.randint(0, bound, indices)
    plain = torch.autograd.grad(model(index).square().sum(), model.table)[0]
    records, grad, _ = live(model, index, lambda _: Group(bits=4))
    assert torch.equal(grad, plain)
    width = 1 if bound <= 256 else 2
    for found in (records, trace(model, index, lambda _: Group(bits=4), OPTIONS)):
        kept = [r for r in found if r.site.op == name and r.dtype == "int64"]
        assert [r.planned for r in kept if r.planned] == [index.numel() * width]


KEEPERS = {
    "an unknown op": torch.log,
    "its own view": lambda h: h.view(64, 32).log(),
    "the model's output": lambda h: h,
}


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("payload_first", [True, False])
def test_a_storage_that_an_op_keeps_has_no_payload(keeper, payload_first, monkeypatch):
    entries, make = [], Entry.__init__
    monkeypatch.setattr(Entry, "__init__", lambda *args: entries.append(args[0]) or make(*args))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = self.first(x)
            kept = None if payload_first else KEEPERS[keeper](h)
            y = self.last(h)
            return y, KEEPERS[keeper](h) if payload_first else kept

    model, x = Model(), torch.randn(32, 64)
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), "activations_only")
    y, kept = model(x)
    pointer = y.grad_fn._saved_mat1.data_ptr()
    others = kept if keeper == "the model's output" else kept.grad_fn._saved_self
    assert pointer == others.data_ptr()
    assert all(entry.packed is None for entry in entries)
