"""A wrong call of a replaced op raises what torch raises; an unusual one gives torch's value."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain

CLASSES = torch.tensor([1, 3])
NAN, INF = float("nan"), float("inf")
CALLS = {
    "pool without a size": lambda x: F.max_pool2d(x),
    "pool by a word": lambda x: F.max_pool2d(x, "2"),
    "pool by a fraction": lambda x: F.max_pool2d(x, 2.5),
    "pool by three sizes": lambda x: F.max_pool2d(x, (2, 2, 2)),
    "pool by a vector": lambda x: F.max_pool1d(x.flatten(2), [2], None),
    "pool by 0": lambda x: F.max_pool2d(x, 0),
    "pool by less than 0": lambda x: F.max_pool2d(x, -2),
    "pool by more than there is": lambda x: F.max_pool2d(x, 9),
    "pool by steps of 0": lambda x: F.max_pool2d(x, 2, stride=0),
    "pool with much padding": lambda x: F.max_pool2d(x, 2, padding=3),
    "pool with another argument": lambda x: F.max_pool2d(x, 2, foo=1),
    "layer norm over nothing": lambda x: F.layer_norm(x, ()),
    "layer norm without a shape": lambda x: F.layer_norm(x),
    "layer norm over a number": lambda x: F.layer_norm(x, 8),
    "layer norm over another shape": lambda x: F.layer_norm(x, (7,)),
    "layer norm with a word": lambda x: F.layer_norm(x, (8,), None, None, "a"),
    "rms norm over another shape": lambda x: F.rms_norm(x, (7,)),
    "group norm without groups": lambda x: F.group_norm(x),
    "group norm in 0 groups": lambda x: F.group_norm(x, 0),
    "group norm in 3 of 4 groups": lambda x: F.group_norm(x, 3),
    "group norm with another weight": lambda x: F.group_norm(x, 2, torch.ones(3)),
    "batch norm with another weight": lambda x: F.batch_norm(
        x, None, None, torch.ones(3), training=True
    ),
    "batch norm with an eps of 0": lambda x: F.batch_norm(x, None, None, training=True, eps=0.0),
    "batch norm of one value": lambda x: F.batch_norm(x[:1, :, 0, 0], None, None, training=True),
    "instance norm of one value": lambda x: F.instance_norm(x[:, :, :1, 0]),
    "instance norm of a vector": lambda x: F.instance_norm(x[0, 0, 0]),
    "dropout of more than all": lambda x: F.dropout(x, 1.5),
    "dropout by a word": lambda x: F.dropout(x, "a"),
    "dropout by a tensor": lambda x: F.dropout(x, torch.tensor(0.5)),
    "cross-entropy by the average": lambda x: F.cross_entropy(logits(x), CLASSES, reduction="avg"),
    "cross-entropy of no class": lambda x: F.cross_entropy(logits(x), CLASSES + 8),
    "cross-entropy of int32": lambda x: F.cross_entropy(logits(x), CLASSES.int()),
    "cross-entropy that ignores None": lambda x: F.cross_entropy(
        logits(x), CLASSES, ignore_index=None
    ),
    "gelu by a word": lambda x: F.gelu(x, approximate="foo"),
    "elu by a word": lambda x: F.elu(x, "a"),
    "elu by a tensor": lambda x: F.elu(x, torch.tensor(2.0)),
    "leaky relu by an imaginary slope": lambda x: F.leaky_relu(x, 1j),
    "softplus by 0": lambda x: F.softplus(x, 0),
    "celu by 0": lambda x: F.celu(x, 0.0),
    "hardtanh the wrong way": lambda x: F.hardtanh(x, 1, -1),
    "hardtanh from NaN": lambda x: F.hardtanh(x, NAN, 1.0),
    "clamp by nothing": lambda x: x.clamp(),
    "clamp by a word": lambda x: x.clamp("a"),
    "clamp the wrong way": lambda x: x.clamp(1, -1),
    "clamp by NaN": lambda x: x.clamp(NAN),
    "clamp by infinities": lambda x: x.clamp(-INF, INF),
    "softshrink below 0": lambda x: F.softshrink(x, -1.0),
    "threshold without one": lambda x: F.threshold(x),
    "threshold at NaN": lambda x: F.threshold(x, NAN, 0.0),
    "relu with another argument": lambda x: F.relu(x, foo=1),
    "relu in place by a number": lambda x: F.relu(x, inplace=1),
    "sigmoid into a tensor": lambda x: torch.sigmoid(x, out=torch.empty(0)),
}


def logits(x):
    return x[:, 0, 0].contiguous()


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.ones(1)), call

    def forward(self, x):
        return self.call(x * self.weight)


def outcome(model, x):
    """The class of the error, or what the model returns after a backward."""
    torch.manual_seed(0)
    try:
        y = model(x)
        y.sum().backward()
    except Exception as error:  # noqa: BLE001 (torch's are of many classes)
        return type(error)
    return y.detach()


@pytest.mark.parametrize("name", CALLS)
def test_an_error_or_a_value_is_torchs(name):
    x = torch.randn(2, 4, 8, 8)
    baseline, model = (Model(CALLS[name]) for _ in range(2))
    cfg = {"preset": "activations_only", "activations": {"min_elements": 0}}
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), cfg)
    expected, found = outcome(baseline, x), outcome(model, x)
    if isinstance(expected, type):
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
