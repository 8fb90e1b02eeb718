"""Models under an interception: how they are made, intercepted and trained."""

import torch
from torch import nn

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.saved.options import Options
from memtrain.audit.live_storages import LiveStorages
from memtrain.compressors import DerivativeCode, Group, Identity

NONLINEAR = ("gelu", "gelu_tanh", "silu", "relu")


def identity(site):
    return Identity()


def lossy(site):
    return DerivativeCode(bits=3) if site.op in NONLINEAR else Group(bits=4)


def intercept(model, choose=lossy, records=None, **options):
    on_saved = list.copy if records is None else records.extend
    options = Options(**{"min_elements": 64, **options})
    interception = Interception(model, choose, options=options, seed=0, on_saved=on_saved)
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


def stack_is_clean():
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and not torch.overrides._get_current_function_mode_stack()
    )


class Fn(nn.Module):
    """A model of one parameter, any function and the modules that the function calls."""

    def __init__(self, function, p=None, **modules):
        super().__init__()
        drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) / 8
        self.p = nn.Parameter(drawn if p is None else p)
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.function(self, *args)


def gradient(function, *args, choose=None):
    model = Fn(function)
    records = []
    if choose is not None:
        intercept(model, choose, records)
    model(*args).sum().backward()
    return model.p.grad, records
