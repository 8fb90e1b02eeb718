"""The tensors of training and their groups: against cases worked by hand, and on real models."""

import pytest
import torch
from torch import nn

from experiments.cifar import FAMILIES, cifar
from memtrain.precision.graph import graph_of
from memtrain.precision.tensor_names import writes


def names(graph, group):
    return [value.name for value in graph.groups()[group]]


class Residual(nn.Module):
    """A shortcut with a weight of its own, a view, a scalar, a frozen weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.shortcut = nn.Linear(8, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(x * self.gain)
        y = self.second(self.first(x).relu_())
        return (y + self.shortcut(x)).view(-1, 4).square().sum()


def test_groups_of_a_residual_block_by_hand():
    graph = graph_of(Residual(), torch.ones(5, 8, requires_grad=True))
    assert graph.gemms == ("first / linear", "second / linear", "shortcut / linear")
    # the shortcut's weight joins the activations that it multiplies, not those before it
    assert names(graph, 0) == [
        "(root) / input / input", "(root) / mul / output", "(root) / tanh / output",
        "gain", "first.weight", "shortcut.weight",
    ]  # fmt: skip
    assert names(graph, 1) == ["first / linear / output", "(root) / relu / output", "second.weight"]
    assert names(graph, 2) == ["second / linear / output"]
    # the view makes no tensor, the sum is a single number
    assert names(graph, 3) == [
        "shortcut / linear / output", "(root) / add / output", "(root) / square / output",
    ]  # fmt: skip
    values = {value.name: value for value in graph.tensors}
    assert not values["gain"].gradient
    assert values["(root) / input / input"].gradient
    assert [value.gemm_input for value in graph.groups()[0]] == [
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    assert values["first / linear / output"].gemm_output
    assert not values["(root) / relu / output"].gemm_output
    assert graph.elements == 2 * (3 * 40 + 2 * 64) + 8 + 2 * (80 + 64) + 2 * 40 + 2 * 120


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 8)

    def forward(self, ids):
        x = self.hidden(self.table(ids))
        return x @ self.table.weight.t()


def test_a_weight_of_two_groups_is_in_the_first_and_counts_once():
    graph = graph_of(Tied(), torch.zeros(4, 3, dtype=torch.long))
    assert [value.name for value in graph.tensors if value.weight] == [
        "table.weight", "hidden.weight", "hidden.bias",
    ]  # fmt: skip
    assert "table.weight" in names(graph, 0)


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.layer(self.act(self.layer(x))))


def test_a_module_that_runs_again_has_numbered_names():
    graph = graph_of(Again(), torch.ones(2, 4))
    found = [value.name for value in graph.tensors if not value.weight]
    assert found[1:] == [
        "layer / linear / output", "act / relu / output",
        "layer / linear / output1", "act / relu / output1",
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_convolutional_models(family):
    model = cifar(family=family, width=0.1, channels=3).eval()
    graph = graph_of(model, torch.zeros(2, 3, 32, 32))
    kinds = (nn.Conv2d, nn.Linear)
    assert len(graph.gemms) == sum(isinstance(module, kinds) for module in model.modules())
    weights = {value.name: value.numel for value in graph.tensors if value.weight}
    assert weights == {name: p.numel() for name, p in model.named_parameters()}
    assert not any(module.training for module in model.modules())
    listed = str(graph).splitlines()
    assert len(listed) == 1 + len(graph.groups()) + len(graph.tensors)
    assert f"{graph.elements:,} elements" in listed[0]


def test_gpt2_by_its_layers():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    ids = torch.zeros(2, 16, dtype=torch.long)
    graph = graph_of(GPT2LMHeadModel(config), {"input_ids": ids})
    layer = ["attn.c_attn / addmm", "attn / scaled_dot_product_attention"]
    layer += ["attn.c_proj / addmm", "mlp.c_fc / addmm", "mlp.c_proj / addmm"]
    blocks = [f"transformer.h.{i}.{gemm}" for i in (0, 1) for gemm in layer]
    assert graph.gemms == (*blocks, "lm_head / linear")
    assert "transformer.h.0.mlp.c_fc.weight" in names(graph, 3)


def test_attention_and_recurrence_are_one_operator_each():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.lstm(y)[0]

    graph = graph_of(Both(), torch.ones(2, 5, 8))
    assert graph.gemms == ("attention / multi_head_attention_forward", "lstm / lstm")
    assert "lstm.weight_ih_l0" in names(graph, 1)
    assert "attention.in_proj_weight" in names(graph, 0)


def test_a_model_without_a_gemm_is_refused():
    with pytest.raises(ValueError, match="LayerNorm has no GEMM"):
        graph_of(nn.LayerNorm(8), torch.ones(2, 8))


def test_in_place_functions_are_found_by_their_names():
    found = ("add_", "__iadd__", "__setitem__", "__invert__", "__add__", "relu")
    assert [writes(name, {}) for name in found] == [True, True, True, False, False, False]
    assert writes("relu", {"inplace": True})
