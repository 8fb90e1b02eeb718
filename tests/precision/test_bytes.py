"""What is rounded is kept in its own bytes: predicted, measured, and exact."""

import pytest
import torch
from torch import nn

import memtrain
from memtrain.audit.live_storages import LiveStorages, saved_nbytes
from memtrain.compressors import Group
from memtrain.config.sources import ActivationRule, Config
from memtrain.precision.assignment import Precision

# without the overflow counts that promotion keeps until the backward, 8 bytes a tensor
UNIFORM = Config(precision=Precision(assignment="uniform", promotion=None))


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64)]
    return nn.Sequential(*layers)


def wrapped(model, activations=None, **fields):
    fields = {"assignment": "uniform", "promotion": None, **fields}
    precision = Precision(**fields)
    cfg = Config(precision=precision)
    if activations is not None:
        cfg.activations.rules = activations
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)


def saved(model, x):
    """Bytes alive between a forward and its backward, outputs and inputs separately."""
    model(x)  # records the sites
    return saved_nbytes(lambda: model(x), exclude=[x, *model.parameters(), *model.buffers()])[0]


HIGH = {"assignment": "size_ordered", "ratio": 0.0}


@pytest.mark.parametrize(
    ("fields", "each"),
    [({}, 1), ({**HIGH}, 2), ({**HIGH, "high": "fp32"}, 4)],
    ids=["fp8", "fp16", "fp32"],
)  # fmt: skip
def test_a_rounded_tensor_takes_the_bytes_of_its_format(fields, each):
    model, _ = wrapped(mlp(), **fields)
    x = torch.randn(256, 64)
    found = saved(model, x)
    # the input (the user's own where it is not rounded), relu's output, tanh's
    elements = 256 * ((64 if each < 4 else 0) + 128 + 128)
    weights = (128 * 128 + 128 * 64) if each < 4 else 0  # rounded copies
    assert found == each * (elements + weights)


def test_the_audit_predicts_what_is_measured():
    x, cfg = torch.randn(256, 64), UNIFORM
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = memtrain.audit(model, x, cfg, optimizer=optimizer)
    total = report.totals()["saved activations"]
    model, _ = memtrain.wrap(model, optimizer, cfg)
    assert total.planned == saved(model, x)
    assert total.plain == 4 * 256 * (128 + 128)
    rows = [row for row in report.rows if row.kind == "activation" and row.planned]
    assert all(row.compressor.startswith("Float(") for row in rows)


def test_backward_sees_the_same_values_with_and_without_codes():
    """Of tensors under min_elements nothing is encoded: the gradients must be the same."""
    x, found = torch.randn(64, 64), []
    for least in (0, 10**9):
        model = mlp()
        cfg = Config(precision=Precision(assignment="uniform", promotion=None))
        cfg.activations.min_elements = least
        model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_rule_decides_where_it_claims_a_tensor():
    rules = [
        ActivationRule(op="relu", compressor={"name": "derivative", "bits": 1}),
        ActivationRule(op="tanh", compressor={"name": "group", "bits": 4}),
        ActivationRule(module="0", compressor="keep"),
    ]
    model, _ = wrapped(mlp(), rules)
    model(torch.randn(256, 64)).sum().backward()
    entries = memtrain.plan_of(model).entries("activation")
    assert [(entry.site, entry.compressor or entry.reason, entry.planned) for entry in entries] == [
        ("0 / linear / input", "its rule says keep", 4 * 256 * 64),
        ("1 / relu / input", "payload", 256 * 128 // 8),
        ("2 / linear / input", "Float(format='fp8_forward')", 256 * 128),
        ("2 / linear / input1", "Float(format='fp8_forward')", 128 * 128),
        ("3 / tanh / input", repr(Group(bits=4)), 256 * 128 * 33 // 64),
        ("4 / linear / input", "Float(format='fp8_forward')", 256 * 128),
        ("4 / linear / input1", "Float(format='fp8_forward')", 128 * 64),
    ]


def test_nothing_of_the_forward_is_left_after_the_backward():
    model, _ = wrapped(mlp())
    x = torch.randn(256, 64)
    model(x).sum().backward()
    model.zero_grad()
    with LiveStorages() as live:
        y = model(x)
        y.sum().backward()
        model.zero_grad()
        del y
        assert live.nbytes(exclude=[x, *model.parameters()]) == 0
