"""Optimizers of other libraries and their checkpoints."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import memtrain

SHAPE = (70, 100)


class Quantised(Tensor):
    """As torchao's states: a subclass that does nothing but say what it stands for."""

    @staticmethod
    def __new__(cls, codes):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    __torch_dispatch__ = None

    def dequantize(self, dtype):
        return torch.ones(SHAPE, dtype=dtype)


def checkpoint(states, **options):
    group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, **options}
    return {"state": {0: states}, "param_groups": [{**group, "params": [0]}]}


OPTIMIZER = "CompressedOptimizer alone"
WEIGHTS = ["activations=none", "optim=none", "weights=bf16+8"]


def wrapped(preset, kind=torch.optim.AdamW):
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    if preset == OPTIMIZER:
        return memtrain.optim.CompressedOptimizer(kind(model.parameters()))
    return memtrain.wrap(model, kind(model.parameters()), preset)[1]


class AdamW8bit(torch.optim.Optimizer):
    """Keeps its states under bitsandbytes' names: codes, values of codes, and scales of blocks."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["state1"] = torch.zeros(SHAPE, dtype=torch.uint8)
                state["qmap1"], state["absmax1"] = torch.linspace(-1, 1, 256), torch.zeros(28)
            state["state1"] += 1
            param.sub_(self.param_groups[0]["lr"] * state["state1"] * param.grad)


@pytest.mark.parametrize("preset", [OPTIMIZER, "balanced", "activations_only"])
@pytest.mark.filterwarnings("ignore:.*states? .*:RuntimeWarning")
def test_states_of_an_optimizer_of_another_library_load_into_it_again(preset):
    optimizer = wrapped(preset, AdamW8bit)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(SHAPE)
    optimizer.step()
    saved, before = copy.deepcopy(optimizer.state_dict()), dict(optimizer.state[param])
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[param].keys() == before.keys()
    assert (optimizer.state[param]["state1"] == 2).all()


@pytest.mark.parametrize("preset", [OPTIMIZER, "balanced", "all_four"])
def test_states_under_bitsandbytes_names_are_refused_by_other_optimizers(preset):
    optimizer = wrapped(preset)
    values = {"step": 7, "state1": torch.zeros(SHAPE, dtype=torch.uint8)}
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"state.*exp_avg"):
        optimizer.load_state_dict(checkpoint(values))
    assert str(optimizer.state_dict()) == before


@pytest.mark.parametrize("preset", [OPTIMIZER, "balanced", "activations_only", WEIGHTS], ids=str)
def test_states_of_a_class_of_another_library_are_refused(preset):
    optimizer, codes = wrapped(preset), torch.zeros(SHAPE, dtype=torch.uint8)
    values = {name: Quantised(codes) for name in ("exp_avg", "exp_avg_sq")}
    saved = checkpoint({"step": torch.tensor(7.0), **values})
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"is a Quantised.*dequantize\(torch.float32\)"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


OF_OTHERS = [
    *(("bitsandbytes.optim", name) for name in ("AdamW", "AdamW8bit", "Lion8bit", "AdEMAMix8bit")),
    *(("schedulefree", name) for name in ("AdamWScheduleFree", "SGDScheduleFree")),
    ("prodigyopt", "Prodigy"),
    *(("torchao.optim", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(("pytorch_optimizer", name) for name in ("SOAP", "DAdaptAdam", "Prodigy", "Adan", "ADOPT")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("library", "name"), OF_OTHERS)
def test_optimizers_of_others_stay_exact_with_one_warning(library, name):
    kind = getattr(pytest.importorskip(library), name)

    def trained(preset):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        optimizer = kind(model.parameters(), lr=1e-3)
        if preset is not None:
            model, optimizer = memtrain.wrap(model, optimizer, preset)
        if hasattr(optimizer, "train"):  # schedule-free
            optimizer.train()
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(32, 128)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        expected, exact = trained(None), trained("exact")
        said = len([one for one in found if "memtrain" in str(one.message)])
        found.clear()
        kept = trained("optimizer_only")
    ends = r"stay exact: memtrain knows only|no state of .* is compressed"
    of_states = [one for one in found if re.search(ends, str(one.message))]
    assert (said, len(of_states)) == (0, 1)
    for a, b, c in zip(expected, exact, kept, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_payloads_are_refused_where_states_are_plain():
    def wrapped(preset):
        torch.manual_seed(0)
        model = nn.Linear(64, 256)
        model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), preset)
        model(torch.ones(4, 64)).sum().backward()
        return optimizer

    saving, loading = wrapped("balanced"), wrapped("activations_only")
    saving.step()
    loading.step()
    before = str(loading.state_dict())
    with pytest.raises(ValueError, match=r"'exp_avg' .*\(256, 64\).*portable_state_dict"):
        loading.load_state_dict(saving.state_dict())
    assert str(loading.state_dict()) == before
    loading.load_state_dict(memtrain.optim.portable_state_dict(saving))
    loading.step()
