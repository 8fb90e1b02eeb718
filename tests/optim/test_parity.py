"""States kept exactly give torch's numbers, and a run may change hands in its midst."""

import inspect

import pytest
import torch
from torch import nn
from torch.optim import SGD, RMSprop

from memtrain.compressors import Identity, Key
from memtrain.optim import (
    Choice,
    CompressedOptimizer,
    compress,
    portable_state_dict,
    restore,
    state_bytes,
)
from memtrain.optim.states.known_optimizers import SEPARABLE
from tests.optim.behaviours import parameter, step_equally, twin
from tests.optim.torch_inputs import TORCHS, give_gradients, inputs, parameters, plain

NAMES = [f"compress({name})" for name in TORCHS if name not in ("LBFGS", "SparseAdam")]


@pytest.mark.parametrize("name", NAMES)
def test_taken_over_and_given_back_in_mid_run(name):
    for given in inputs(name, "foreach", "fused"):
        own, theirs = parameters(name), parameters(name)
        original, twin = (plain(name, params, **given.options) for params in (own, theirs))
        for turn in range(6):
            if turn == 2:
                optimizer = compress(original, lambda param, state: Identity(), min_elements=0)
            if turn == 4:
                assert restore(optimizer) is original
            give_gradients(name, own, theirs, seed=turn)
            (optimizer if turn in (2, 3) else original).step()
            twin.step()
        assert all(map(torch.equal, own, theirs)), given.what


def test_compressing_twice_is_refused():
    with pytest.raises(TypeError, match="already"):
        compress(compress(torch.optim.AdamW([nn.Parameter(torch.ones(3))])))


def test_scheduler_made_before_keeps_working():
    weight = nn.Parameter(torch.ones(80, 80))
    original = torch.optim.AdamW([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(original, gamma=0.5)
    optimizer = compress(original)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert restore(optimizer).param_groups[0]["lr"] == 0.25

    assert state_bytes(optimizer) == 0


def implementations():
    """Each optimizer of torch, as a loop over parameters, over lists, and fused."""
    for kind in sorted(SEPARABLE - {torch.optim.SparseAdam}, key=lambda kind: kind.__name__):
        known = inspect.signature(kind).parameters
        for option in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):
            if option.keys() <= known.keys():
                yield pytest.param(kind, option, id=f"{kind.__name__} {option or ''}")


@pytest.mark.parametrize(("kind", "option"), [*implementations()])
def test_each_step_is_torchs_from_the_decompressed_states_and_is_stored(kind, option):
    """Also where a kernel writes a state without a new version, as torch's fused SGD does."""
    options = {"lr": 0.01, **({"momentum": 0.9} if kind in (SGD, RMSprop) else {}), **option}
    weight = parameter(80, 80)
    choose = Choice(second="B128/Linear")
    ours = CompressedOptimizer(kind([weight], **options), choose)
    for _ in range(5):
        other = twin(weight)
        plain = kind([other], **options)
        plain.load_state_dict(portable_state_dict(ours))
        step_equally((weight, ours), (other, plain))
        for name, state in ours.state[weight].items():
            whole = plain.state[other][name]
            if isinstance(state, dict):
                compressor, _ = ours.compressor(weight, name)
                stored = compressor.compress(whole, key=Key()).tensors
                assert all(torch.equal(state[part], stored[part]) for part in stored), name
            else:
                assert whole == state if not isinstance(whole, torch.Tensor) else whole.equal(state)
        weight.grad = torch.randn_like(weight)
