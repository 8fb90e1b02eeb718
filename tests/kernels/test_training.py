"""Models train by the Triton kernels as by their references: whole steps of what launches hand on.

In the interpreter; natively under `MEMTRAIN_GPU=1`; as compiled under `MEMTRAIN_PTX=1`.
"""

from contextlib import nullcontext

import pytest
import torch

import memtrain
from memtrain.activations.saved import payload
from memtrain.kernels.dispatch import backend
from memtrain.kernels.group import group

PRESETS = ("balanced", "smallest", "fewbit3", "actnn_l3", "gact4", "all_four", "all_four_2bit")
STEPS = 3


def train(name, preset, dtype):
    """Losses of a small GPT-2 whose every tensor is compressed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **drops, **ends))
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    overrides = [f"preset={preset}", "activations.min_elements=1", "optim.min_elements=1"]
    model, optimizer = memtrain.wrap(model, optimizer, overrides)
    x = torch.arange(64).view(2, 32) * 7 % 64
    losses = []
    with nullcontext() if name is None else backend(name):
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["triton"])
def test_losses_are_those_of_the_references(name, preset, dtype):
    # Sums in another order put some elements at a bound into the next code; a few units of the
    # parameters' precision, or of 2**-12 of what 4-bit codes keep, is all that may come of it.
    room = 4 * max(torch.finfo(dtype).eps, 2.0**-12)
    got, want = train(name, preset, dtype), train("reference", preset, dtype)
    assert got == pytest.approx(want, rel=room)
    assert want[-1] < want[0]


def test_saves_bound_to_triton_kernels_train_as_those_of_the_cpu(monkeypatch):
    want = train(None, "balanced", torch.float32)
    bound = []

    def triton_kernel_of(*given):
        with backend("triton"):
            bound.append(kernel_of(*given))
        return bound[-1]

    kernel_of = group.kernel_of
    monkeypatch.setattr(group, "kernel_of", triton_kernel_of)
    monkeypatch.setattr(payload, "_SPECIALIZED", {})
    assert train(None, "balanced", torch.float32) == pytest.approx(want, rel=2.0**-20)
    assert any(bound)
