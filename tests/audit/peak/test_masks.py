"""Batches with an attention mask: transformers builds what it builds in a real step."""

import pytest
import torch

from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict

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
