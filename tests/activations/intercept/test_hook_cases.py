"""The interception on calls of every kind: what is kept, listed, or left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.compressors import Group
from tests.activations.intercept.intercepted import (
    Fn,
    gradient,
    identity,
    intercept,
    lossy,
    stack_is_clean,
)


def test_weights_outside_the_model_casts_and_weight_norm_are_not_touched():
    hidden = nn.Linear(64, 64)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    model = Fn(lambda self, x: normed(hidden(F.linear(x.bfloat16(), self.p.bfloat16()).float())))
    records = []
    intercept(model, lossy, records)
    model(torch.randn(96, 64)).sum().backward()
    assert {r.shape for r in records if r.compressor} == {(96, 64)}


@pytest.mark.parametrize("preset", ["balanced", "smallest"])
def test_presets_give_a_weight_that_is_computed_8_bits(preset):
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True)
            return F.conv2d(x, w.view_as(self.weight))

    model = nn.Sequential(nn.Conv2d(8, 64, 1), Standardised(64, 64, 3), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = memtrain.make_plan(model, optimizer, preset, batch=torch.randn(4, 8, 6, 6))
    found = {entry.site: entry.compressor for entry in plan.entries("activation")}
    assert "bits=8" in found["1 / conv2d / input1"]
    assert "bits=8" not in found["1 / conv2d / input"]


def test_overlapping_windows_are_kept_and_give_the_plain_gradient():
    def windows(self, x):
        u = (x @ self.p).unfold(1, 8, 1)
        return u.transpose(1, 2) @ u

    x = torch.randn(64, 64)
    plain, _ = gradient(windows, x)
    packed, _ = gradient(windows, x, choose=lambda site: Group(bits=8))
    assert torch.equal(packed, plain)


def test_a_negated_view_does_not_share_the_payload_of_its_base():
    def both_signs(self, z):
        return F.linear(z.imag.detach(), self.p) * 2 + F.linear(z.conj().imag.detach(), self.p)

    z = torch.randn(64, 64, dtype=torch.complex64) * 1
    plain, _ = gradient(both_signs, z)
    coarse, fine = (
        (gradient(both_signs, z, choose=lambda site, b=b: Group(bits=b))[0] - plain).norm()
        for b in (4, 8)
    )
    assert fine == coarse == 0  # a negated view is kept


@pytest.mark.parametrize("choose", [identity, lossy])
def test_sparse_and_nested_tensors_pass_through_and_are_listed(choose):
    x = torch.randn(64, 64)
    adjacency = torch.eye(64).to_sparse()
    plain, _ = gradient(lambda self, x: torch.sparse.mm(adjacency, x @ self.p), x)
    packed, records = gradient(
        lambda self, x: torch.sparse.mm(adjacency, x @ self.p), x, choose=choose
    )
    assert torch.equal(packed, plain)
    assert any("layout torch.sparse_coo" in record.reason for record in records)


def test_transforms_of_torch_func_are_left_alone_and_listed():
    model = Fn(lambda self, x: torch.tanh(x @ self.p))
    records = []
    intercept(model, lossy, records)
    x = torch.randn(64, 64)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    grads = torch.func.grad(loss)(dict(model.named_parameters()))
    expected, _ = gradient(lambda self, x: torch.tanh(x @ self.p), x)
    torch.testing.assert_close(grads["p"], expected)
    assert [record.reason[:28] for record in records] == ["inside a transform of torch."]


def test_hooks_of_someone_else_are_left_alone_and_listed():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    records = []
    intercept(model, lossy, records)
    with torch.autograd.graph.save_on_cpu():
        model(torch.randn(64, 64)).sum().backward()
    assert [r.reason for r in records] == ["saved-tensor hooks of someone else are on"]


def test_ctrl_c_then_detach_leaves_other_models_alone():
    def interrupted(self, x):
        raise KeyboardInterrupt

    model = Fn(interrupted)
    interception = intercept(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(64, 64))
    interception.detach()
    assert stack_is_clean()


def test_submodules_called_in_turn_are_all_recorded():
    model = nn.ModuleDict({"enc": nn.Linear(64, 64), "dec": nn.Linear(64, 64)})
    records = []
    intercept(model, lossy, records)
    model["dec"](model["enc"](torch.randn(64, 64))).sum().backward()
    by_module = {record.site.module: record for record in records}
    assert set(by_module) == {"enc", "dec"}
    # what the encoder made is nobody else's to keep alive
    assert by_module["dec"].compressor.startswith("Group")


def test_inputs_inside_containers_are_known_as_inputs():
    _, records = gradient(
        lambda self, batch: batch["x"] @ self.p, {"x": torch.randn(64, 64)}, choose=lossy
    )
    assert [r.reason for r in records] == ["the model's own input: stays alive anyway"]


def test_a_composite_that_someone_watches_runs_as_it_is():
    from transformers.activations import NewGELUActivation

    model = nn.Sequential(nn.Linear(64, 64), NewGELUActivation())
    seen = []
    intercept(model)
    model(torch.randn(32, 64)).sum().backward()
    model[1].register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    model(torch.randn(32, 64)).sum().backward()
    assert seen == [(32, 64)]


@pytest.mark.parametrize("call", [
    lambda x: torch.dropout(x, p=0.5, train=True), lambda x: F.dropout(x, 0.5, True),
    lambda x: F.dropout(x, p=0.5, training=False), lambda x: F.dropout(x, 0.5, True, True),
    lambda x: F.dropout(x, p=0.0), lambda x: F.dropout(x, p=1.0),
])  # fmt: skip
def test_every_form_of_dropout(call):
    x = torch.randn(64, 64)
    torch.manual_seed(5)
    plain, _ = gradient(lambda self, x: call(x @ self.p), x)
    torch.manual_seed(5)
    packed, _ = gradient(lambda self, x: call(x @ self.p), x, choose=lossy)
    assert torch.equal(packed, plain)
