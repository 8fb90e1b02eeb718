"""Estimates are the simulated step's, of a data set's worst batch; what is measured is no more."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memtrain
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.timeline import ALLOCATED

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1}


def llama(vocab=256, device="cpu"):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=vocab, num_attention_heads=4, num_key_value_heads=2)
    with torch.device(device):
        return LlamaForCausalLM(config)


def tokens(*shape):
    ids = torch.zeros(shape, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def same(predicted, measured):
    """Whether all bytes are the same, and those of each part that an allocator can distinguish.

    A Python number that an op is given is a tensor of 8 bytes, and cast 4 more: no mode sees them.
    """
    known = {name: size for name, size in measured.parts.items() if name != ALLOCATED}
    numbers = measured.nbytes - predicted.nbytes
    return numbers in (0, 8 + 4) and known.items() <= predicted.parts.items()


class Adapted(nn.Module):
    """A frozen linear layer and two low-rank ones that are trained."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(vocab=256):
    model = llama(vocab).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


@pytest.mark.parametrize(
    ("make", "cfg"),
    [
        ("llama", None),
        ("adapted", "balanced"),
        pytest.param("llama", "balanced", marks=pytest.mark.nightly),
        pytest.param("adapted", None, marks=pytest.mark.nightly),
    ],
)
def test_the_estimate_of_a_large_vocabulary_is_what_a_step_takes(make, cfg):
    model = {"llama": llama, "adapted": adapted}[make](5000)
    found = memtrain.estimate(model, tokens(2, 64), cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    real = measure(model, torch.optim.AdamW(trained), tokens(2, 64), cfg)
    assert same(found.peak, real.peak)
    assert found.fits(real.peak.nbytes)
    assert not found.fits(real.peak.nbytes - 1)
    assert (found.worst, found.peaks) == (None, {})


class Scales:
    def __init__(self):
        self.scale = torch.ones(64, 1)


class Codes(nn.Parameter):
    """As quantised bases have them: the scales are an attribute of the parameter."""

    def __new__(cls, data):
        found = super().__new__(cls, data, requires_grad=False)
        found.state = Scales()
        return found


class Quantised(nn.Module):
    in_features = out_features = 64

    def __init__(self):
        super().__init__()
        self.weight = Codes(torch.zeros(64, 64, dtype=torch.uint8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.float() * self.weight.state.scale)


def test_a_quantised_base_is_estimated_with_its_scales():
    model, batch = nn.Sequential(nn.Linear(64, 64), Adapted(Quantised())), torch.ones(32, 64)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = memtrain.estimate(model, batch)
    real = measure(model, torch.optim.AdamW(trained), batch, None)
    assert same(found.peak, real.peak)
    assert type(model[1].base.weight) is Codes


def test_the_worst_batch_of_a_data_sets_lengths():
    model = llama(device="meta")
    lengths = [7, 90, 12, 33, 90]
    found = memtrain.estimate(model, lengths=lengths, batch_size=4)
    assert found.worst == (4, 90)
    assert list(found.peaks) == [(4, 90)]
    padded = {**tokens(4, 90), "attention_mask": torch.ones(4, 90, dtype=torch.long)}
    padded["attention_mask"][3, 7:] = 0
    assert found.peak.nbytes == memtrain.estimate(model, padded).peak.nbytes
    assert str(found).startswith(f"{found.peak.nbytes / 2**20:.2f} MiB for 4 x 90 tokens in ")
    shorter = {name: values[1:, :33] for name, values in padded.items()}
    steps = [(m, torch.optim.AdamW(m.parameters())) for m in (llama(), llama())]
    real, less = (measure(*step, b, None) for step, b in zip(steps, (padded, shorter), strict=True))
    assert same(found.peak, real.peak)
    assert less.peak.nbytes < found.peak.nbytes
    alone = memtrain.estimate(model, tokens(1, 8), lengths=lengths)
    assert alone.peak.nbytes == memtrain.estimate(model, tokens(1, 90)).peak.nbytes


def test_of_batches_those_that_may_be_the_worst_are_predicted():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    batches = [[8] * 10, [50, 50], [50], [9, 8, 8], [100]]
    found = memtrain.estimate(model, torch.zeros(1, 4, dtype=torch.long), lengths=batches)
    assert set(found.peaks) == {(10, 8), (2, 50), (3, 9), (1, 100)}
    assert max(found.peaks.values()) == found.peaks[found.worst] == found.peak.nbytes
    assert found.peaks[2, 50] > found.peaks[10, 8]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs a batch, or lengths"),
        ({"lengths": [3]}, "Linear is not a transformers model of text: lengths= needs a batch"),
        ({"batch": torch.ones(1, 4), "lengths": [3, 0]}, "smallest of lengths is 0"),
        ({"batch": torch.ones(1, 4), "lengths": []}, "smallest of lengths is 0"),
        ({"batch": torch.ones(1, 4), "lengths": [3], "batch_size": 0}, "batch_size=0; allowed: 1"),
        ({"batch": torch.ones(1, 4), "lengths": [3, [4]]}, "of samples or of batches"),
    ],
)
def test_wrong_arguments_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        memtrain.estimate(nn.Linear(4, 4), **given)


def test_sizes_are_given_with_their_unit():
    found = memtrain.estimate(nn.Linear(4, 4), torch.ones(1, 4))
    assert found.fits("1MiB")
    with pytest.raises(ValueError, match="memory='24 gigs' is not a size"):
        found.fits("24 gigs")
