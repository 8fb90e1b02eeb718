"""The interception on unmodified models: nothing changes but the bytes."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtrain.activations.intercept import Interception
from memtrain.compressors import DerivativeCode, Group, Identity
from memtrain.meter import LiveStorages

NONLINEAR = ("gelu", "gelu_tanh", "silu", "relu")


def identity(site):
    return Identity()


def lossy(site):
    return DerivativeCode(bits=3) if site.op in NONLINEAR else Group(bits=4)


def intercept(model, choose=lossy, records=None):
    settle = list.copy if records is None else records.extend
    interception = Interception(model, choose, min_elements=64, seed=0, settle=settle)
    interception.attach()
    return interception


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3),
        nn.SiLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ), torch.randn(8, 3, 16, 16)


def gpt2(attention):
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=99, n_positions=64, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation=attention,
    )  # fmt: skip
    return GPT2Model(config).train(), torch.randint(0, 99, (4, 32))


def llama(attention):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return LlamaModel(config).train(), torch.randint(0, 99, (4, 32))


MODELS = {
    "cnn": cnn,
    "gpt2-eager": lambda: gpt2("eager"),
    "gpt2-sdpa": lambda: gpt2("sdpa"),
    "llama-eager": lambda: llama("eager"),
    "llama-sdpa": lambda: llama("sdpa"),
}


def train(model, x):
    """One seeded forward and backward: output, gradients, bytes held between the two."""
    torch.manual_seed(7)
    with LiveStorages() as live:
        out = model(x)
        out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
        held = live.nbytes(exclude=[out])
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}, held


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


@pytest.mark.parametrize("name", MODELS)
def test_lossy_holds_what_its_records_say_and_a_fraction_of_plain(name):
    model, x = MODELS[name]()
    out, grads, held = train(model, x)
    records = []
    interception = intercept(model, lossy, records)
    out2, grads2, held2 = train(model, x)
    interception.detach()
    # gelu_new written out in ops and F.gelu round differently; all else is the same forward
    torch.testing.assert_close(out2, out, rtol=1e-4, atol=1e-5)
    assert held2 == sum(record.planned for record in records)
    assert held2 < 0.3 * held
    whole = torch.cat([g.flatten() for g in grads.values()])
    error = torch.cat([(grads2[key] - grads[key]).flatten() for key in grads])
    assert 0 < error.norm() < 0.5 * whole.norm()


def test_sites_have_readable_names():
    model, x = gpt2("sdpa")
    records = []
    intercept(model, lossy, records)
    train(model, x)
    names = {record.site.name for record in records}
    assert "h.1.mlp.act / gelu_tanh / input" in names
    assert any(name.startswith("h.0.attn / scaled_dot_product_attention / ") for name in names)
    assert "h.0.mlp.c_fc / addmm / input1" in names


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


def test_an_inplace_write_between_two_saves_makes_two_payloads():
    model, x = Inplace(), torch.randn(64, 64)
    intercept(model, lambda site: Group(bits=8))
    model(x).sum().backward()
    # d(sum)/dW has the column sums of the input in each row: 2x for a, 2x + 1 for b
    for layer, expected in ((model.a, 2 * x), (model.b, 2 * x + 1)):
        error = (layer.weight.grad[0] - expected.sum(0)).abs().max()
        step = (expected.max() - expected.min()) / 255
        assert error < 64 * step


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


def test_inplace_change_of_a_kept_tensor_raises_as_plain_torch_does():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            y = self.layer(x).exp()
            y.add_(1)
            return y

    for choose in (None, identity):
        model = Bad()
        if choose:
            intercept(model, choose)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.randn(64, 64)).sum().backward()


def test_deepcopy_and_pickle_keep_working_and_stay_independent():
    model, x = cnn()
    intercept(model)
    train(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert train(twin, x)[2] == train(model, x)[2]
        hook = next(iter(twin._forward_pre_hooks.values()))
        assert hook.func.__self__.model is twin


def test_state_dict_and_class_are_unchanged():
    model, _ = cnn()
    keys, cls = list(model.state_dict()), type(model)
    interception = intercept(model)
    assert (list(model.state_dict()), type(model)) == (keys, cls)
    interception.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def stack_is_clean():
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch.overrides._get_current_function_mode_stack()
    )


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_a_working_model(error):
    class Fails(nn.Module):
        broken = True

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            y = F.gelu(self.layer(x))
            if self.broken:
                raise error
            return y

    model = Fails()
    records = []
    intercept(model, lossy, records)
    with pytest.raises(error):
        model(torch.randn(64, 64))
    assert records == []
    model.broken = False
    model(torch.randn(64, 64)).sum().backward()
    assert stack_is_clean()
    assert len(records) == 2


def test_no_grad_costs_nothing_and_saves_nothing():
    model, x = cnn()
    records = []
    intercept(model, lossy, records)
    with torch.no_grad():
        model(x)
    assert records == []
    assert stack_is_clean()


def test_a_submodule_called_first_is_intercepted_too():
    model, _ = gpt2("sdpa")
    records = []
    intercept(model, lossy, records)
    model.h[0](torch.randn(4, 32, 64, requires_grad=True))
    assert any(record.site.module == "h.0.mlp.act" for record in records)
    assert stack_is_clean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_gradients_of_plain_checkpointing(reentrant):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            return self.b(F.gelu(self.a(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model, x = Net(), torch.randn(64, 64)
    _, grads, _ = train(model, x)
    intercept(model, identity)
    _, grads2, _ = train(model, x)
    assert all(torch.equal(grads[key], grads2[key]) for key in grads)
    intercept(model, lossy)
    _, grads3, _ = train(model, x)
    assert all(torch.isfinite(grad).all() for grad in grads3.values())


def test_several_forwards_before_a_backward():
    model, x = cnn()
    intercept(model)
    loss = model(x).sum() + model(x * 2).sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast_copies_of_weights_are_kept():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    records = []
    intercept(model, lossy, records)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(128, 64)).sum().backward()
    reasons = {r.site.name: r.reason for r in records}
    assert "autocast's copy of a parameter" in reasons.values()
    assert {r.dtype for r in records if r.compressor.startswith("Group")} == {"bfloat16"}


def test_frozen_parameters_and_dropout_train_bit_identically_under_identity():
    model, x = cnn()
    model[0].weight.requires_grad_(False)
    out, grads, _ = train(model, x)
    interception = intercept(model, identity)
    out2, grads2, _ = train(model, x)
    interception.detach()
    assert torch.equal(out, out2)
    assert grads["0.weight"] is None
    assert grads2["0.weight"] is None


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


def test_equal_seeds_repeat_and_steps_differ():
    def gradient(forwards):
        torch.manual_seed(0)
        model, x = gpt2("sdpa")
        intercept(model)
        for _ in range(forwards):
            grads = train(model, x)[1]
        return grads["h.0.mlp.c_fc.weight"]

    assert torch.equal(gradient(1), gradient(1))
    assert not torch.equal(gradient(1), gradient(2))
