"""Every registered compressor in every role: it trains, or is refused by name before anything."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import memtrain
from memtrain.compressors import COMPRESSORS, Compressor, Key, Packed

# What a compressor needs besides its name; one that is not listed has defaults for all fields.
FIELDS = {"host": {"inner": {"name": "group"}}, "integers": {"limit": 9}}
# ... and in a role: a second moment has no sign, and must not come back as zero.
UNSIGNED = {"block": {"signed": False, "map": "DE-0"}, "float": {"format": "bf16"}}
SIGNED = {"rank1": {"signed": True}}

FLOATS = {"identity", "group", "samples", "block", "patch", "rank1", "float", "one_bit"}
NOT_FIRST = {"rank1", "patch"}  # biased in sign
NOT_SECOND = {"one_bit", "group", "samples", "patch"}  # they round small numbers to zero
ALLOWED = {
    "activation": FLOATS | {"derivative", "host"},
    "recompute": FLOATS | {"host"},
    "exp_avg": FLOATS - NOT_FIRST,
    "exp_avg_sq": (FLOATS - NOT_SECOND) | {"factored"},
    "momentum_buffer": FLOATS - NOT_FIRST,
    "weight": set(),
}


@dataclass(frozen=True, kw_only=True)
class OneBit(Compressor):
    """A new compressor: signs and the mean magnitude. This file and one line make it known."""

    parts = ("signs", "scale")
    second_moment = False

    def compress(self, x: Tensor, *, key: Key) -> Packed:
        return Packed({"signs": x >= 0, "scale": x.float().abs().mean()}, x.shape, x.dtype)

    def decompress(self, packed: Packed) -> Tensor:
        signs, scale = packed.tensors["signs"], packed.tensors["scale"]
        return torch.where(signs, scale, -scale).to(packed.dtype)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "one_bit", OneBit)


def spec(name, role):
    own = UNSIGNED if role == "exp_avg_sq" else SIGNED
    return {"name": name, **FIELDS.get(name, {}), **own.get(name, {})}


def config(name, role):
    """A config that asks for one compressor in one role, and for nothing else."""
    found = {"preset": "exact", "optim": {"rules": [], "min_elements": 64}}
    found["activations"] = {"rules": [], "min_elements": 64}
    if role == "activation":
        found["activations"]["exceptions"] = [{"op": "linear|gelu", "compressor": spec(name, role)}]
    elif role == "recompute":
        found["activations"] |= {"recompute": ["1"], "recompute_inputs": spec(name, role)}
    elif role == "weight":
        found["weights"] = name
    else:
        found["optim"]["exceptions"] = [{"state": role, "compressor": spec(name, role)}]
    return found


def task(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Sequential(nn.GELU(), nn.Linear(128, 32)))
    x = torch.randn(64, 128)
    target = (x @ torch.randn(128, 32) / 12).tanh()
    return model, optimizer(model.parameters()), x, target


def train(model, optimizer, x, target):
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class General(torch.optim.NAdam):
    """Has AdamW's states and no fused kernel, so `CompressedOptimizer` serves it."""


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=4e-3),
    "general": lambda params: General(params, lr=4e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.8),
}
ROLES = [
    ("activation", "adamw"),
    ("recompute", "adamw"),
    ("exp_avg", "adamw"),
    ("exp_avg", "general"),
    ("exp_avg_sq", "adamw"),
    ("exp_avg_sq", "general"),
    ("momentum_buffer", "sgd"),
    ("weight", "adamw"),
]


@pytest.mark.filterwarnings("ignore:no state of:RuntimeWarning")  # of identity alone
@pytest.mark.parametrize(("role", "kind"), ROLES)
@pytest.mark.parametrize("name", [*COMPRESSORS, "one_bit"])
def test_trains_or_is_refused_by_name(name, role, kind):
    model, optimizer, x, target = task(OPTIMIZERS[kind])
    if name not in ALLOWED[role]:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="allowed: ") as error:
            memtrain.wrap(model, optimizer, config(name, role))
        reported = str(error.value)
        known = COMPRESSORS[name].__name__
        assert known in reported or repr(name) in reported
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not hasattr(model, "_memtrain")
        optimizer.step()  # is still its own
        return
    model, optimizer = memtrain.wrap(model, optimizer, config(name, role))
    losses = train(model, optimizer, x, target)
    assert losses[-1] < 0.9 * losses[0]
    if role in ("exp_avg", "exp_avg_sq", "momentum_buffer") and name != "identity":
        param = model[0].weight
        compressor, _ = optimizer.compressor(param, role)
        assert optimizer.is_payload(param, role, optimizer.state[param][role])
        assert isinstance(compressor, COMPRESSORS[name])


@pytest.mark.parametrize("name", sorted(FLOATS - NOT_FIRST - {"identity"}))
def test_states_go_through_a_checkpoint(name, tmp_path):
    model, optimizer, x, target = task(OPTIMIZERS["adamw"])
    model, optimizer = memtrain.wrap(model, optimizer, config(name, "exp_avg"))
    train(model, optimizer, x, target)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    straight = train(model, optimizer, x, target)
    weights, states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model, optimizer, x, target = task(OPTIMIZERS["adamw"])
    model, optimizer = memtrain.wrap(model, optimizer, config(name, "exp_avg"))
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert train(model, optimizer, x, target) == straight


def test_the_wrong_sign_is_refused_for_a_state():
    for name, state, allowed in (
        ("rank1", "exp_avg", "compressors with"),
        ("block", "exp_avg_sq", "identity, factored"),
    ):
        model, optimizer, *_ = task(OPTIMIZERS["adamw"])
        own = {"preset": "exact", "optim": {"rules": [], "min_elements": 64}}
        own["optim"]["exceptions"] = [{"state": state, "compressor": {"name": name}}]
        with pytest.raises(ValueError, match=f"'{state}', .* allowed: {allowed}"):
            memtrain.wrap(model, optimizer, own)
