"""Live bytes stay flat over many steps, whatever becomes of what a forward saved."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.live_storages import LiveStorages
from memtrain.optim import AdamW4bit, ReleaseGradients, SplitWeights, compress
from memtrain.optim.states import layout


class Experts(nn.Module):
    """One of four experts serves a step; another runs for nothing, and is never unpacked."""

    def __init__(self):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))  # noqa: E731
        self.experts, self.step, self.aside = nn.ModuleList([make() for _ in range(4)]), 0, None

    def forward(self, x):
        y = self.experts[self.step % 4](x)
        self.aside = self.experts[(self.step + 1) % 4](x)
        if self.step % 7 == 3:
            raise ValueError("broken off")
        return y


@pytest.mark.parametrize(
    "preset",
    ["all_four", *(pytest.param(p, marks=pytest.mark.nightly) for p in ("balanced", "smallest"))],
)
def test_200_steps_of_experts_exceptions_and_dropped_losses_keep_bytes_flat(preset):
    torch.manual_seed(0)
    model = Experts()
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), preset)
    seen = []
    with LiveStorages() as live:
        for model.step in range(201):
            loss = None
            try:
                loss = model(torch.randn(32, 64)).float().square().mean()
            except ValueError:
                model.aside = None
            if loss is not None and model.step % 5:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            del loss
            if model.step % 40 == 0:
                model.aside = None
                seen.append(live.nbytes())
    assert len(set(seen[1:])) == 1, seen


def wrapped(preset):
    """A model and its optimizer after two steps."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.LayerNorm(64), nn.Linear(64, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    small = ["activations.min_elements=1", "optim.min_elements=1"]
    model, optimizer = memtrain.wrap(model, optimizer, [f"preset={preset}", *small])
    for _ in range(2):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


FREED = ("exact", "balanced", "checkpointed", "all_four", "actnn_l3", "gact4")


@pytest.mark.each_value
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("preset", FREED)
def test_del_frees_a_model_and_its_optimizer(preset, copied):
    """Python's collector counts objects, not bytes: it comes by long after memory is out."""
    model, optimizer = wrapped(preset)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
        model(torch.randn(32, 64)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        alive = [weakref.ref(x) for x in (model, optimizer, *model.parameters())]
        del model, optimizer
        assert [x() for x in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("preset", ["balanced", "checkpointed", "exact"])
def test_a_part_of_a_model_that_is_gone_trains_on(preset):
    def gradients(*, gone):
        torch.manual_seed(0)
        model, _ = wrapped(preset)
        parts = model[0], model[2]
        if gone:
            del model
        x = torch.randn(32, 64, requires_grad=True)
        for _ in range(2):
            parts[1](parts[0](x * 1)).square().sum().backward()
        return [x.grad, *(p.grad for part in parts for p in part.parameters())]

    found, expected = gradients(gone=True), gradients(gone=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def stochastic(params):
    choose = layout.Choice(first="B128/DE+SR")
    return compress(torch.optim.SGD(params, lr=0.1, momentum=0.9), choose)


def two(make):
    params = [nn.Parameter(torch.randn(128, 64)) for _ in range(2)]
    return params, make(params)


def step(params, optimizer):
    sum(param.float().sum() for param in params).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [AdamW4bit, lambda params: compress(torch.optim.Adagrad(params)), stochastic],
    ids=["fused", "around another", "stochastic"],
)
def test_a_parameter_that_is_taken_out_of_its_group_is_freed(make):
    params, optimizer = two(make)
    step(params, optimizer)
    gone = weakref.ref(params[1])
    del params[1], optimizer.param_groups[0]["params"][1]
    optimizer.state.popitem()
    assert gone() is None
    step(params, optimizer)
    copies = [copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))]
    for each in (*copies, (params, optimizer)):
        step(*each)
    assert all(torch.equal(twin[0], params[0]) for twin, _ in copies)


@pytest.mark.parametrize("around", [SplitWeights, ReleaseGradients])
def test_steps_of_stochastic_states_keep_no_masters_and_no_gradients(around):
    params, optimizer = two(lambda params: around(stochastic(params)))
    with LiveStorages() as live:
        seen = []
        for _ in range(3):
            step(params, optimizer)
            seen.append(live.nbytes())
    assert len(set(seen)) == 1, seen
