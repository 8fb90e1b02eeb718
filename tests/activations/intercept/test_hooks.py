"""The interception on unmodified models: nothing changes but the bytes."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

from memtrain.compressors import Group
from tests.activations.intercept.intercepted import (
    cnn,
    gpt2,
    identity,
    intercept,
    llama,
    lossy,
    train,
)

MODELS = {
    "cnn": cnn,
    "gpt2-eager": lambda: gpt2("eager"),
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "llama-eager": lambda: llama("eager"),
    "llama-sdpa": lambda: llama("sdpa"),
}


@pytest.mark.parametrize("name", MODELS)
def test_identity_is_bit_identical_and_holds_the_same_bytes(name):
    model, x = MODELS[name]()
    out, grads, held = train(model, x)
    interception = intercept(model, identity)
    out2, grads2, held2 = train(model, x)
    interception.detach()
    assert torch.equal(out, out2)
    assert all(torch.equal(grads[key], grads2[key]) for key in grads)
    assert held2 == held


def at_four_bits(model, x):
    """Bytes of plain PyTorch's saves, were those that a rule may claim kept in groups: 256 float32
    numbers, 1,024 bytes, in 128 bytes of codes and 4 of bounds."""
    records = []
    interception = intercept(model, identity, records)
    train(model, x)
    interception.detach()
    return sum(-(-r.nbytes // 1024) * 132 if r.compressor else r.nbytes for r in records)


@pytest.mark.parametrize("name", MODELS)
def test_lossy_holds_what_its_records_say_and_a_fraction_of_plain(name):
    model, x = MODELS[name]()
    bound = at_four_bits(copy.deepcopy(model), x)
    wide = train(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)[0]
    out, grads, held = train(model, x)
    records = []
    interception = intercept(model, lossy, records)
    out2, grads2, held2 = train(model, x)
    interception.detach()
    # gelu_new written out in ops and F.gelu round differently; all else is the same forward
    assert (out2 - wide).norm() <= 2 * (out - wide).norm()
    assert held2 == sum(record.planned for record in records)
    assert held2 <= bound < held
    assert any(not torch.equal(grads[key], grads2[key]) for key in grads)


def test_sites_have_readable_names():
    model, x = gpt2("sdpa")
    records = []
    intercept(model, lossy, records)
    train(model, x)
    names = {record.site.name for record in records}
    assert "h.1.mlp.act / gelu_tanh / input" in names
    assert "h.0.attn / scaled_dot_product_attention / saved" in names  # dropout: written out
    assert "h.0.mlp.c_fc / addmm / input" in names


def test_parameters_and_the_models_input_are_never_touched():
    model = nn.Linear(64, 64, bias=False)
    records = []
    intercept(model, lossy, records)
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    assert [(r.site.tensor, r.reason) for r in records] == [
        ("input", "the model's own input: stays alive anyway")
    ]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = x * 2
        return self.q(x) + self.k(x.view(2, 32, 64)).view(64, 64) + self.v(x)


def test_a_storage_saved_several_times_is_compressed_once():
    records = []
    model = Shared()
    intercept(model, lossy, records)
    model(torch.randn(64, 64)).sum().backward()
    notes = Counter(record.reason for record in records if record.site.op == "linear")
    assert notes == {"": 1, "shared with an earlier save": 2}


class Inplace(nn.Module):
    """Saves one storage, writes to it, saves it again."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = x * 2
        y = self.a(x.detach())
        with torch.no_grad():
            x.add_(1)
        return y + self.b(x.detach())


def test_an_inplace_write_between_two_saves_makes_two_payloads_and_is_plains_error():
    x, records, ours = torch.randn(64, 64), [], Inplace()
    intercept(ours, lambda site: Group(bits=8), records)
    for model in (Inplace(), ours):
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert [record.reason for record in records] == ["", ""]  # the second shares nothing


def test_a_new_storage_at_an_old_address_is_not_taken_for_the_old_one():
    class Reuse(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))

        def forward(self, x):
            # each product dies after its save was compressed: the allocator reuses its address
            return sum(layer((x * i).detach()) for i, layer in enumerate(self.layers))

    model, x = Reuse(), torch.randn(64, 64)
    intercept(model, lambda site: Group(bits=8))
    model(x).sum().backward()
    for i, layer in enumerate(model.layers):
        expected = (x * i).sum(0)
        assert (layer.weight.grad[0] - expected).abs().max() <= 64 * i * (x.max() - x.min()) / 255


def test_deepcopy_and_pickle_keep_working_and_stay_independent():
    model, x = cnn()
    intercept(model)
    train(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert train(twin, x)[2] == train(model, x)[2]
        hook = next(iter(twin._forward_pre_hooks.values()))
        assert hook.__self__.owner.model is twin


@pytest.mark.parametrize("batch", [64, 128])
def test_autocast_copies_of_weights_are_not_compressed(batch):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    records = []
    intercept(model, lossy, records)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(batch, 64)).sum().backward()
    # whatever their shapes: batch and width may be equal
    assert [r.site.module for r in records if r.site.tensor == "input1"] == ["2"]
    assert {r.compressor for r in records if r.site.tensor == "input1"} == {""}
    assert {r.dtype for r in records if r.compressor.startswith("Group")} == {"bfloat16"}


def test_dropout_mask_takes_one_bit_and_draws_what_torch_draws():
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3))
    x = torch.randn(64, 64)
    out, grads, _ = train(model, x)
    records = []
    intercept(model, lossy, records)
    out2, grads2, _ = train(model, x)
    assert torch.equal(out, out2)
    assert all(torch.equal(grads[key], grads2[key]) for key in grads)
    assert sum(r.planned for r in records if r.site.op == "dropout") == 64 * 256 / 8
