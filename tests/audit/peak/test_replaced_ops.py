"""Ops that memtrain replaces are replaced in a predicted step, too: both hold the same."""

import pytest
import torch
from torch import nn

from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict

CLAMPS = {
    "both": lambda x: x.clamp(-9, 9),
    "greatest": lambda x: x.clamp(max=2),
    "least": lambda x: x.clamp_min(-1),
    "torch": lambda x: torch.clamp(x, -1.5, 0.1),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -0.3, 0.3),
    "softshrink": lambda x: nn.functional.softshrink(x, 0.1),
    "relu6": nn.functional.relu6,
    "threshold": lambda x: nn.functional.threshold(x, 0.1, 0.0),
    "leaky": lambda x: nn.functional.leaky_relu(x, 0.3),
}


class Ends(nn.Module):
    def __init__(self, op, dtype):
        super().__init__()
        self.first, self.last = nn.Linear(64, 512, dtype=dtype), nn.Linear(512, 64, dtype=dtype)
        self.op = op

    def forward(self, x):
        return self.last(self.op(self.first(x)))


class TanhGELU(nn.Module):
    """Written out, as transformers' `NewGELUActivation` is."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class RootMeanSquares(nn.Module):
    """Written out, as Llama's norm is."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden_states):
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLAMPS)
def test_functions_with_bounds_are_predicted(name, dtype):
    torch.manual_seed(0)
    model, batch = Ends(CLAMPS[name], dtype), torch.randn(2048, 64, dtype=dtype)
    given = model, torch.optim.SGD(model.parameters()), batch
    predicted, measured = predict(*given, "balanced"), measure(*given, "balanced")
    assert predicted.peak.nbytes == pytest.approx(measured.peak.nbytes, rel=0.03)


@pytest.mark.parametrize("cfg", [None, "balanced", "all_four"])
def test_a_model_whose_activations_and_norms_are_written_out_is_predicted(cfg):
    torch.manual_seed(0)
    blocks = [[RootMeanSquares(64), nn.Linear(64, 256), TanhGELU(), nn.Linear(256, 64)]] * 3
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    given = model, torch.optim.AdamW(model.parameters()), torch.randn(1024, 64)
    predicted, measured = predict(*given, cfg), measure(*given, cfg)
    assert predicted.peak.phase == measured.peak.phase
    assert predicted.peak.nbytes == pytest.approx(measured.peak.nbytes, rel=0.03)


class LateReader(nn.Linear):
    """A listed op reads the result of `exp`; then another op does, so that the result is kept."""

    def forward(self, x):
        y = super().forward(x).exp()
        return (y * super().forward(x)).sum() + y.log1p().sum()


def test_a_payload_that_a_later_op_undoes_is_predicted():
    model = LateReader(64, 256)
    given = model, torch.optim.SGD(model.parameters()), torch.randn(64, 64), "balanced"
    assert predict(*given).peak.nbytes == measure(*given).peak.nbytes


NONE = dict.fromkeys(
    ("attn_pdrop", "resid_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0
)  # with dropout, the CPU writes attention out and keeps no mask
CONFIGS = {
    # Its GELU multiplies by three numbers: products save them, as tensors that no mode sees.
    "GPT2Config": ("CausalLM", {"n_embd": 32, "n_layer": 1, "n_head": 2}, 3 * 8),
    "BertConfig": (
        "MaskedLM",
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 64},
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_a_mask_costs_what_it_costs_in_a_real_step(config):
    transformers = pytest.importorskip("transformers")
    task, options, numbers = CONFIGS[config]
    own = getattr(transformers, config)(vocab_size=64, **options, **NONE)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(own).train()
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.zeros(2, 128, dtype=torch.long)
    peaks = {}
    for padding in (False, True):
        mask = torch.ones_like(tokens)
        mask[1, 100:] = 0 if padding else 1
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        predicted, measured = (run(model, optimizer, batch) for run in (predict, measure))
        assert predicted.peak.nbytes == measured.peak.nbytes - numbers
        peaks[padding] = predicted.peak.nbytes
    assert peaks[True] > peaks[False]
