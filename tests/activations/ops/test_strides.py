"""A replaced op returns torch's values in torch's strides, whatever the strides of its input."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.activations.ops import nonlinear, pool

LAYOUTS = {
    "contiguous": lambda: torch.randn(8, 16, 8, 12),
    "transposed": lambda: torch.randn(8, 16, 12, 8).transpose(2, 3),
    "permuted": lambda: torch.randn(16, 8, 12, 8).permute(1, 0, 3, 2),
    "channels last": lambda: torch.randn(8, 16, 8, 12).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(8, 16, 8, 24)[..., :12],
    "strided": lambda: torch.randn(8, 16, 8, 24)[..., ::2],
    "expanded": lambda: torch.randn(8, 16, 1, 12).expand(8, 16, 8, 12),
}
ARGUMENTS = {"threshold": (0.1, 0.2), "clamp": (-0.5, 0.5), "clip": (-0.5, 0.5)}
ARGUMENTS |= dict.fromkeys(("clamp_min", "clamp_max"), (0.1,)) | dict.fromkeys(pool.NAMES, (2,))
NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "dropout": lambda x: F.dropout(x, 0.2),
}
NAMES = [*nonlinear.NAMES, *pool.NAMES]


def function_of(name):
    if name in NORMS:
        return NORMS[name]
    for owner in (F, torch, torch.Tensor):
        found = getattr(owner, name, None)
        if found is not None:
            return lambda x: found(x, *ARGUMENTS.get(name, ()))
    return None


class OneOp(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1))

    def forward(self, x):
        memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        h = (memory * self.weight).as_strided(x.shape, x.stride(), x.storage_offset())
        torch.manual_seed(1)
        result = self.function(h)
        self.result = result[0] if isinstance(result, tuple) else result  # without indices
        return self.result.sum()


IN_CI = ("transposed", "channels last")


@pytest.mark.each_value
@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.nightly] * (x not in IN_CI)) for x in LAYOUTS]
)
@pytest.mark.parametrize("name", [*NAMES, *NORMS])
def test_values_and_strides_are_torchs(name, layout):
    function = function_of(name)
    if function is None:
        return  # has no public form by this name
    torch.manual_seed(0)
    x = LAYOUTS[layout]()
    if "1d" in name:
        x = x.flatten(0, 1)
    if "3d" in name:
        x = x.contiguous() if layout == "channels last" else x
        x = x.unsqueeze(0)
    baseline, model = OneOp(function), OneOp(function)
    rules = [
        {"op": "@nonlinear", "compressor": {"name": "derivative", "bits": 4}},
        {"compressor": {"name": "group", "bits": 8}},
    ]
    cfg = {"preset": "activations_only", "activations": {"min_elements": 0, "rules": rules}}
    model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), cfg)
    baseline(x)
    model(x)
    assert model.result.stride() == baseline.result.stride()
    assert torch.equal(model.result, baseline.result)
