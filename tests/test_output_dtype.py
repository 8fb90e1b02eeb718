"""Ordinary loops around a model whose weights `all_four` has made bfloat16."""

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

import memtrain
from memtrain.optim.wrappers.dtypes import map_tensors, restore_outputs

X = torch.rand(8, 80)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()


class Model(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(80, 80), nn.LayerNorm(80), nn.Tanh())
        self.give = give

    def forward(self, x):
        return self.give(self.body(x))


def wrapped(give=lambda y: y, cfg="all_four"):
    torch.manual_seed(0)
    model = Model(give)
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)


def dtypes(output):
    found = []
    map_tensors(lambda x: found.append(x.dtype) or x, output)
    return found


FORMS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, [2 * y]),
    "dict": lambda y: {"a": y, "b": {"c": -y}},
    "dataclass": lambda y: Output(None, y, (y, 2 * y)),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_float32_as_without_memtrain(form):
    model, _ = wrapped(FORMS[form])
    found = dtypes(model(X))
    assert found == [torch.float32] * len(found)
    assert found
    assert type(model(X)) is type(FORMS[form](X))
    assert model.body[0].weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert set(dtypes(model(X))) == {torch.float32}


def test_the_option_leaves_outputs_in_sixteen_bits():
    model, _ = wrapped(cfg=["preset=all_four", "float32_outputs=false"])
    assert model(X).dtype == torch.bfloat16


def test_outputs_of_a_model_that_was_bfloat16_before_stay():
    model = Model(lambda y: y).bfloat16()
    model, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "all_four")
    assert model(X).dtype == torch.bfloat16


def test_only_the_loss_of_a_model_that_computes_one_is_cast():
    model, _ = wrapped(lambda y: Output(y.square().mean(), y, (y,)))
    output = model(X)
    assert dtypes(output) == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_outputs_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model, _ = wrapped(lambda y: outputs.BaseModelOutput(y, (y, y)))
    output = model(X)
    assert type(output) is outputs.BaseModelOutput
    assert output.last_hidden_state.dtype == output.hidden_states[1].dtype == torch.float32


def test_tied_tensors_of_an_output_stay_one():
    model, _ = wrapped(lambda y: (y, y))
    first, second = model(X)
    assert first is second


def bce(model):
    return nn.BCELoss()(model(X).sigmoid(), X)


def huber(model):
    return nn.HuberLoss()(model(X), X)


def network_behind(model):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(80, 4), nn.Tanh()).requires_grad_(False)(model(X)).sum()


def functional(model):
    return torch.func.functional_call(model, dict(model.named_parameters()), (X,)).square().mean()


def part_alone(model):
    return model.body[2](model.body[1](model.body[0](X))).float().square().mean()


def fast_weights(model):
    named = dict(model.named_parameters())
    inner = torch.func.functional_call(model, named, (X,)).square().mean()
    grads = torch.autograd.grad(inner, [*named.values()], create_graph=True)
    fast = {k: p - 0.1 * g for (k, p), g in zip(named.items(), grads, strict=True)}
    return torch.func.functional_call(model, fast, (X,)).square().mean()


@pytest.mark.parametrize(
    "loss", [bce, huber, network_behind, functional, part_alone, fast_weights],
    ids=lambda loss: loss.__name__,
)  # fmt: skip
def test_losses_of_ordinary_scripts_train(loss):
    plain = Model(lambda y: y)
    model, optimizer = wrapped()
    plain.load_state_dict(memtrain.fp32_state_dict(model))
    expected, first = loss(plain), loss(model)
    assert first.item() == pytest.approx(expected.item(), rel=0.02, abs=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    first.backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_float32_weights_put_in_by_functional_call_take_float32_inputs():
    plain = Model(lambda y: y)
    model, _ = wrapped()
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, weights, (X,)), plain(X))


def test_an_average_of_sixteen_bit_weights_warns_and_the_recipe_averages():
    torch.manual_seed(0)
    model = Model(lambda y: y)
    average = copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    model, optimizer = memtrain.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), "all_four"
    )
    with pytest.warns(RuntimeWarning, match="an average of a model with weights='bf16\\+8'"):
        AveragedModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy((model, optimizer))
    model(X).square().mean().backward()
    optimizer.step()
    for _ in range(100):
        for name, value in memtrain.fp32_state_dict(model).items():
            average.state_dict()[name].lerp_(value, 0.01)
    for name, value in memtrain.fp32_state_dict(model).items():
        moved = average.state_dict()[name] - start[name]
        whole = value - start[name]
        assert (moved - (1 - 0.99**100) * whole).norm() < 1e-3 * whole.norm()


def test_an_average_of_kept_weights_does_not_warn():
    model, _ = wrapped(cfg="balanced")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AveragedModel(model)


REQUIRED = "All that gradients=release asks of a loop: .*accumulate.*clip_grad_norm_.*rates.*Scaler"


def test_each_error_of_a_loop_names_all_that_released_gradients_need():
    model, optimizer = wrapped()
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=REQUIRED):
        model(X).sum().backward()
    model, optimizer = wrapped()
    model(X).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=REQUIRED):
        optimizer.step()


def test_a_learning_rate_that_changes_after_the_backward_warns():
    model, optimizer = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-4
        model(X).sum().backward()
        optimizer.step()
    model(X).sum().backward()
    optimizer.param_groups[0]["lr"] = 1e-5
    with pytest.warns(RuntimeWarning, match=r"were \[0.0001\] in the backward.*" + REQUIRED):
        optimizer.step()


def test_parts_of_a_wrapped_list_take_and_give_float32():
    models = [Model(lambda y: y), Model(lambda y: y)]
    params = [p for one in models for p in one.parameters()]
    _, optimizer = memtrain.wrap(models, torch.optim.AdamW(params), "all_four")
    F.mse_loss(models[1](models[0](X)), X).backward()
    optimizer.step()


@pytest.mark.parametrize("container", [lambda y: y, lambda y: {"y": (y,)}], ids=["tensor", "dict"])
def test_no_cycle_of_references_keeps_the_outputs(container):
    """Only the garbage collector, which may come late, would free them."""
    output = container(torch.ones(4, dtype=torch.bfloat16))
    kept = weakref.ref(tree_leaves(output)[0])
    gc.disable()
    try:
        restored = restore_outputs(torch.bfloat16, nn.Identity(), (), output)
        assert tree_leaves(restored)[0].dtype == torch.float32
        del output, restored
        assert kept() is None
    finally:
        gc.enable()
