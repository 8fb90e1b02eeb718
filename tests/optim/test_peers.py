"""Checkpoints of bitsandbytes load as the float32 states that they stand for."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import memtrain
from memtrain.optim import SGD8bit, portable_state_dict

SHAPE = (70, 100)  # 27 blocks of 256, and one of 88


def blocks(x, table, size):
    """Codes of the nearest values of a table, each block by its greatest; and what they say."""
    codes, scales, said = [], [], []
    for part in x.flatten().split(size):
        scale = part.abs().max()
        code = (part[:, None] / scale - table[None]).abs().argmin(1)
        codes.append(code.to(torch.uint8))
        scales.append(scale)
        said.append(table[code] * scale)
    return torch.cat(codes).view(x.shape), torch.stack(scales), torch.cat(said).view(x.shape)


def of_bitsandbytes(form):
    """A parameter's states as bitsandbytes' AdamW8bit writes them, and the float32 ones."""
    moments = torch.randn(SHAPE) * 0.1, torch.rand(SHAPE) ** 4
    tables = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256) ** 2
    values, said = {}, []
    for number, (x, table) in enumerate(zip(moments, tables, strict=True), 1):
        codes, scales, meant = blocks(x, table, 2048 if form == "2048" else 256)
        parts = {"state": codes, "qmap": table, "absmax": scales}
        parts = {"state": x} if form == "32 bits" else parts
        values |= {f"{name}{number}": tensor for name, tensor in parts.items()}
        said.append(x if form == "32 bits" else meant)
    nested = {"__bnb_optimizer_quant_state__": values} if form == "nested" else values
    return {"step": 7, **nested}, said


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


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ("balanced", "nested"),
        ("all_four", "nested"),
        ("activations_only", "nested"),
        (WEIGHTS, "flat"),
        *((OPTIMIZER, form) for form in ("flat", "2048", "32 bits")),
    ],
)
def test_states_load_as_what_they_stand_for(preset, form, tmp_path):
    states, (m, v) = of_bitsandbytes(form)
    torch.save(checkpoint(states), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    plain = {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": v}
    torch.manual_seed(0)
    optimizer = wrapped(preset)
    optimizer.load_state_dict(saved)
    torch.manual_seed(0)
    twin = wrapped(preset)
    twin.load_state_dict({**checkpoint(plain), "param_groups": saved["param_groups"]})
    gradient = torch.randn(SHAPE)
    for each in (optimizer, twin):
        loaded = portable_state_dict(each)["state"][0]
        assert (loaded["exp_avg"] - m).abs().max() <= 0.3 * m.abs().max()  # DE's widest gap
        (param,) = each.param_groups[0]["params"]
        (param * gradient.to(param.dtype)).sum().backward()  # `all_four` steps here
        each.step()
    ours, theirs = (each.param_groups[0]["params"][0] for each in (optimizer, twin))
    assert torch.equal(ours, theirs)


def test_a_momentum_of_bitsandbytes_loads():
    states, (m, _) = of_bitsandbytes("nested")
    inner = states["__bnb_optimizer_quant_state__"]
    for name in ("state2", "qmap2", "absmax2"):
        del inner[name]
    param = nn.Parameter(torch.zeros(SHAPE))
    optimizer = SGD8bit([param], lr=0.1, momentum=0.9)
    optimizer.load_state_dict(checkpoint(states))
    twin = SGD8bit([param], lr=0.1, momentum=0.9)
    twin.load_state_dict(checkpoint({"momentum_buffer": m}))
    states = [each.state[param]["momentum_buffer"] for each in (optimizer, twin)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    assert optimizer.param_groups[0]["momentum"] == 0.9


def two(values):
    values["state1"] = torch.stack([values["state1"]] * 2)


def wrong(values):
    values["absmax1"] = values["absmax1"][:-1]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (torch.optim.AdamW, two, r"state1 has shape \(2, 70, 100\); allowed: \(70, 100\)"),
        (torch.optim.AdamW, wrong, r"'absmax': 27.*allowed: a qmap of 256, and an absmax of 28 or"),
        (torch.optim.AdamW, lambda v: v.pop("qmap2"), "'qmap': None"),
        (torch.optim.AdamW, lambda v: v.update(max1=v["absmax1"]), r"have \['max1'\].*allowed"),
        (torch.optim.AdamW, lambda v: v.pop("state2"), r"lack \['state2'\], which AdamW has"),
        (torch.optim.SGD, lambda v: None, r"'state2'\], and SGD does not; allowed: \['absmax1'"),
        (torch.optim.NAdam, lambda v: None, "for NAdam; allowed: Adam, AdamW, Adagrad"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_changed(kind, change, message):
    optimizer = wrapped(OPTIMIZER, kind)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.randn(SHAPE)
    optimizer.step()
    before, groups = dict(optimizer.state[param]), copy.deepcopy(optimizer.state_dict())
    states, _ = of_bitsandbytes("flat")
    change(states)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(checkpoint(states))
    assert all(optimizer.state[param][name] is value for name, value in before.items())
    assert optimizer.state_dict()["param_groups"] == groups["param_groups"]


def test_a_maximum_that_bitsandbytes_lacks_is_refused():
    optimizer = memtrain.optim.compress(
        torch.optim.AdamW([nn.Parameter(torch.ones(SHAPE))], amsgrad=True)
    )
    saved = checkpoint(of_bitsandbytes("flat")[0])
    with pytest.raises(ValueError, match=r"for AdamW, which has .*'max_exp_avg_sq', .* allowed"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("preset", [OPTIMIZER, "balanced", "activations_only", WEIGHTS], ids=str)
def test_states_of_a_class_of_another_library_are_refused(preset):
    optimizer, codes = wrapped(preset), torch.zeros(SHAPE, dtype=torch.uint8)
    values = {name: Quantised(codes) for name in ("exp_avg", "exp_avg_sq")}
    saved = checkpoint({"step": torch.tensor(7.0), **values})
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"is a Quantised.*dequantize\(torch.float32\)"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == before


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "name", "ours"),
    [
        ("bitsandbytes", "AdamW8bit", "AdamW8bit"),
        ("bitsandbytes", "PagedAdamW8bit", "AdamW4bit"),
        ("bitsandbytes", "Adam8bit", "Adam8bit"),
        ("bitsandbytes", "Lion8bit", "Lion8bit"),
        ("bitsandbytes", "SGD8bit", "SGD8bit"),
    ],
)
def test_what_the_library_itself_wrote_loads_and_goes_on(library, name, ours, tmp_path):
    """Steps with theirs, then one with each from there, our states in float32: the same."""
    theirs = pytest.importorskip(f"{library}.optim")
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(128, 96))
    options = {"lr": 1e-3, "weight_decay": 0.0} | ({"momentum": 0.9} if "SGD" in name else {})
    optimizer = getattr(theirs, name)([param], **options)
    gradients = [torch.randn(128, 96) for _ in range(6)]
    for gradient in gradients[:5]:
        param.grad = gradient.clone()
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = nn.Parameter(param.detach().clone())
    mine = getattr(memtrain.optim, ours)([other], min_elements=param.numel(), **options)
    mine.load_state_dict(saved)
    for each, tensor in ((optimizer, param), (mine, other)):
        tensor.grad = gradients[5].clone()
        each.step()
    # A step is at most 1.8 lr, in float32; each rounds its parameter once.
    rounding = torch.finfo(torch.float32).eps
    assert (param - other).abs().max() <= rounding * param.abs().max() + 16 * rounding * 1e-3


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
