"""Compression bound to a form of saves: bit for bit what the compressor does without it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved.bound import Bound
from memtrain.activations.saved.flatten import flatten, memory_of
from memtrain.activations.saved.handles import Shared, tensor_of
from memtrain.compressors import Group, Identity, Key
from memtrain.kernels import cpu
from memtrain.kernels.dispatch import backend

HAS_LIBRARY = cpu.library() is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="binds the C++ kernels")
X = torch.randn(2, 4, 3 * 32, generator=torch.Generator().manual_seed(0))
SAVES = {
    "contiguous": X,
    "transposed": X.transpose(0, 2),
    "queries": X[..., 32:64],
    "heads": X[..., :32].unflatten(2, (2, 16)).transpose(1, 2),
    "bfloat16": X.bfloat16(),
}


@needs_library
@pytest.mark.parametrize("name", SAVES)
def test_what_is_bound_is_what_the_compressor_does(name):
    x, code = SAVES[name], Group(bits=4, group_size=32)
    layout, place = memory_of(x)
    bound = Bound.of(x, layout, place, code)
    packed = code.compress(flatten(x, layout, rows=place)[0], key=Key(seed=3))
    assert bound is not None
    parts = bound.compress(x, Key(seed=3).bits())
    assert all(map(torch.equal, parts, packed.tensors.values()))
    assert bound.nbytes == packed.nbytes
    whole = tensor_of(packed, code, layout)
    shared = Shared(packed, code, layout)
    with backend("reference"):
        told = bound.read(shared)
    for again in (bound.read(shared), told):
        assert torch.equal(again, whole)
        assert again.shape == x.shape


def test_other_compressors_and_tensors_are_left_to_them():
    def bound(x, code):
        return Bound.of(x, *memory_of(x), code)

    assert bound(X, Identity()) is None
    assert bound(X, Group(group_size=12)) is None
    assert bound(X.double(), Group()) is None
    assert bound(X[:, :1].expand(2, 4, 96), Group()) is None
    assert bound(X[:, ::2, ::2], Group()) is None
    with backend("reference"):
        assert bound(X, Group()) is None


class Norms(nn.Module):
    """Calls a norm as `how` says."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(32, 32), nn.Parameter(torch.ones(32))
        self.how = "plain"

    def forward(self, x):
        x = self.first(x)
        if self.how == "frozen":
            x = x.detach()
        if self.how == "half":
            return F.layer_norm(x.bfloat16(), (32,), self.weight.bfloat16()).float().sum()
        if self.how == "pairs":
            return F.layer_norm(x, (8, 32)).square().sum() + self.weight.sum()
        eps = 0.5 if self.how == "eps" else 1e-5
        if self.how == "named":
            y = F.layer_norm(input=x, normalized_shape=(32,), weight=self.weight)
        else:
            y = F.layer_norm(x, [32], weight=self.weight, eps=eps)
        return (y * torch.arange(32.0)).square().sum()


def trained(*, settles):
    torch.manual_seed(0)
    model, found = Norms(), []
    interception = Interception(
        model,
        lambda site: Group(group_size=32),
        options=Options(min_elements=64),
        seed=0,
        on_saved=lambda records: None,
    )
    interception.attach()
    for k, how in enumerate(
        ["plain", "plain", "plain", "eps", "half", "pairs", "named", "frozen", "plain"]
    ):
        if not settles:
            interception.record_again()
        model.how = how
        torch.manual_seed(k)
        model.zero_grad()
        model(torch.randn(4, 8, 32)).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert bool(interception.saved.replaced) == settles
    return found


def test_a_norm_called_otherwise_is_recognised_anew():
    for settled, anew in zip(trained(settles=True), trained(settles=False), strict=True):
        assert len(settled) == len(anew)
        assert all(map(torch.equal, settled, anew))
