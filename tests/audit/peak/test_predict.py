"""The predicted peak is that of a real step; every byte alive has a category."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memtrain import audit
from memtrain.activations.ops import cross_entropy
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
from memtrain.kernels.dispatch import backend
from memtrain.kernels.step.step import FIELDS
from memtrain.kernels.step.update_rules import COUNT
from memtrain.optim import AdamW4bit

OFF = {"preset": "exact", "optim": {"rules": []}, "activations": {"rules": []}}


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Net(nn.Module):
    """Convolution, batch norm, dropout and attention, checkpointed or not."""

    def __init__(self, again=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.1)
        self.qkv = nn.Linear(64, 192)
        self.block = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 10)
        self.again = again

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.conv(x)))).flatten(1).unflatten(1, (-1, 64))
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.again is not None:
            x = checkpoint(self.block, x, use_reentrant=self.again)
        else:
            x = self.block(x)
        return self.head(x.mean(1))


def net_case(again=None):
    torch.manual_seed(0)
    model = Net(again)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 3, 32, 32)


def test_a_step_by_hand():
    model = mlp()
    weights = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    found = predict(model, torch.optim.SGD(model.parameters()), torch.ones(32, 64))
    inputs, hidden, out = 4 * 32 * 64, 4 * 32 * 256, 4 * 32 * 64
    first, second = 4 * (64 * 256 + 256), 4 * (256 * 64 + 64)
    expected = {
        "start": weights + inputs,
        "forward of 0 / addmm": weights + inputs + hidden,
        "forward of 1 / gelu": weights + inputs + 2 * hidden,
        "forward of 2 / addmm": weights + inputs + 2 * hidden + out,
        # the loss, its gradient (expanded: 4 bytes), then the weight's, bias's and input's
        # the weight's product copies the expanded gradient; the bias's sum comes after it
        "backward of 2 / addmm": weights + inputs + 3 * hidden + second - 4 * 64 + out + 8,
        "backward of 1 / gelu": weights + inputs + 3 * hidden + second + 8,
        "backward of 0 / addmm": weights + inputs + hidden + second + first + 8,
    }
    moments = {moment.label: moment for moment in found.moments}
    assert {label: moments[label].nbytes for label in expected} == expected
    assert moments["forward of 2 / addmm"].parts == {
        "weights": weights,
        "inputs": inputs,
        "saved activations": 2 * hidden,
        "temporaries": out,
    }
    assert all(m.nbytes == sum(m.parts.values()) for m in found.moments)


CONFIGS = {
    "plain": None,
    "balanced": "balanced",
    "all_four": "all_four",
    "released": {**OFF, "gradients": "release"},
}


NUMBERS = 8 + 4
"""Bytes of a Python number that an op is given, as float64 and cast: no mode sees these tensors."""


def torch_products(*, in_16_bits):
    """Torch's own products of 16-bit floats: oneDNN's hold scratch that depends on the CPU."""
    return torch.backends.mkldnn.flags(enabled=False) if in_16_bits else nullcontext()


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, None) for name in CONFIGS), ("plain", torch.bfloat16), ("all_four", torch.bfloat16)],
)
def test_the_peak_is_that_of_a_real_step(name, autocast):
    model, optimizer, batch = net_case()
    options = StepOptions(autocast=autocast)
    with torch_products(in_16_bits=autocast is not None or name == "all_four"):
        predicted = predict(model, optimizer, batch, CONFIGS[name], options)
        measured = measure(model, optimizer, batch, CONFIGS[name], options)
    assert predicted.peak.nbytes == pytest.approx(measured.peak.nbytes, rel=0.03)
    assert predicted.peak.phase == measured.peak.phase
    phases = [moment.phase for moment in predicted.moments]
    assert phases == sorted(phases, key=["forward", "backward", "step"].index)


@pytest.mark.parametrize("again", [False, True], ids=["checkpoint", "reentrant"])
def test_checkpointed_activations_are_alive_again_in_the_backward_only(again):
    model, optimizer, batch = net_case(again)
    predicted = predict(model, optimizer, batch)
    real = measure(model, optimizer, batch).peak.nbytes
    # No op allocates the random state that checkpoint keeps; a GPU's step keeps it on the host.
    assert predicted.peak.nbytes == real - torch.get_rng_state().nbytes
    recomputed = [m for m in predicted.moments if m.parts.get("recomputed activations")]
    assert {moment.phase for moment in recomputed} == {"backward"}
    assert any(m.label == "recomputing block.0 / addmm" for m in recomputed)
    hidden = 4 * 4 * 64 * 256
    assert max(m.parts["recomputed activations"] for m in recomputed) >= 2 * hidden

    def saved(timeline):
        return max(m.parts.get("saved activations", 0) for m in timeline.moments)

    whole = predict(*net_case())
    assert saved(whole) - saved(predicted) == pytest.approx(2 * hidden, rel=0.01)


class Uneven(Net):
    """Equal blocks on fewer and fewer rows; every second one is checkpointed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(6))

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = x[: 3 * len(x) // 4]
            x = x + (checkpoint(block, x, use_reentrant=False) if place % 2 else block(x))
        return x


def test_equal_blocks_that_are_called_differently_are_each_predicted():
    model, batch = Uneven(), torch.randn(4096, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    real = measure(model, optimizer, batch).peak.nbytes
    assert predict(model, optimizer, batch).peak.nbytes == pytest.approx(real, rel=0.03)


def test_released_gradients_come_and_go():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    largest_one = 4 * 256 * 64
    bias, kept = 4 * 256, 4 * 64  # the kept that nobody clips stays until the step
    released = largest_one + bias + kept
    for cfg, most in ((None, 2 * largest_one + 4 * 320), (CONFIGS["released"], released)):
        moments = predict(model, optimizer, torch.ones(32, 64), cfg).moments
        assert max(moment.parts.get("gradients", 0) for moment in moments) == most
        real = measure(model, optimizer, torch.ones(32, 64), cfg).peak.nbytes
        assert max(m.nbytes for m in moments) == real


def test_the_vectors_of_a_factored_step_on_cuda():
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    vectors = 0
    for rows, cols in ((1024, 512), (512, 1024)):
        parts = cols // 128 * rows + rows // 256 * cols  # of each program's columns and rows
        vectors += 4 * (parts + rows)  # and a ratio for each row
    batch, options = torch.ones(2, 512), StepOptions(device="cuda")
    timeline = predict(model, optimizer, batch, "optimizer_only", options)
    held = [m.parts.get("temporaries", 0) for m in timeline.moments if m.phase == "step"]
    assert max(held) == vectors
    captured = torch.optim.AdamW(model.parameters(), capturable=True)
    plain = (predict(model, one, batch, None, options).peak for one in (optimizer, captured))
    assert next(plain) == next(plain)


@pytest.mark.parametrize(
    ("dtype", "preset"), [(torch.float32, "balanced"), (torch.float64, "all_four")]
)
def test_a_step_in_pure_torch_holds_what_it_makes(dtype, preset):
    model = nn.Sequential(nn.Linear(32, 256), nn.Linear(256, 128)).to(dtype)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.zeros(2, 32, dtype=dtype)
    served = backend("reference") if dtype == torch.float32 else nullcontext()
    with served:
        predicted, measured = (run(model, optimizer, x, preset) for run in (predict, measure))
    assert predicted.peak.nbytes == pytest.approx(measured.peak.nbytes, abs=NUMBERS)
    assert predicted.peak.parts["temporaries"] > 3 * model[1].weight.nbytes


def test_a_norm_that_no_host_waits_for_clips_by_a_scaled_copy():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    cfg = ["preset=balanced", "gradients=release", "release.clip=parameter"]
    largest, label = 4 * 256 * 64, "backward of 2.weight / gradient"
    sums = 4 * (2 * 64 + 256 + 64)  # of the factored state's rows and columns, and ratios of rows
    for device, most in (("cpu", 0), ("cuda", largest + sums)):
        moments = predict(model, optimizer, torch.ones(2, 64), cfg, StepOptions(device=device))
        held = [m.parts["temporaries"] for m in moments.moments if m.label == label]
        # Besides, the activations that the backward goes through, and numbers of one element.
        assert max(held) == pytest.approx(most, abs=4 * 2 * 256 + 64)


@pytest.mark.parametrize("inner", [{"name": "identity"}, {"name": "group", "bits": 8}], ids=str)
def test_what_is_swapped_out_leaves_the_device(inner):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(9)))
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.ones(256, 64)
    rule = {"op": "linear", "compressor": {"name": "host", "inner": inner}}
    cfg = {"preset": "exact", "activations": {"exceptions": [rule]}}
    one = 4 * 256 * 64 if inner["name"] == "identity" else 256 * 64 + 4 * 256 * 64 // 256
    for device, held in (("cpu", 8), ("cuda", 2)):  # of the batch nothing is saved but itself
        moments = predict(model, optimizer, batch, cfg, StepOptions(device=device)).moments
        phases = {m.phase: m.parts.get("saved activations", 0) for m in reversed(moments)}
        assert phases["backward"] // one == held  # two payloads are being offloaded, on CUDA
        assert phases["step"] == 0


def test_torchs_fused_sgd_is_predicted_where_it_is_right():
    model = nn.Linear(64, 64).bfloat16()  # too small for states of its own
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=True)
    given = model, optimizer, torch.ones(2, 64).bfloat16(), "balanced"
    assert predict(*given, StepOptions(device="cuda")).peak.nbytes
    with pytest.raises(ValueError, match="on a CPU random numbers"):
        predict(*given)


@pytest.mark.parametrize(
    ("options", "cfg", "device", "sets"),
    [
        ({"foreach": True}, None, "cpu", 1),
        ({"foreach": False}, None, "cpu", 1),  # twice the largest tensor, which is half of all
        ({}, None, "cuda", 1),  # foreach is torch's choice there
        ({}, "optimizer_only", "cuda", 0),
    ],
    ids=["foreach", "one by one", "cuda", "4-bit"],
)
def test_the_optimizers_own_temporaries(options, cfg, device, sets):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    timeline = predict(model, optimizer, torch.ones(2, 64), cfg, StepOptions(device=device))
    held = [m.parts.get("temporaries", 0) for m in timeline.moments if m.phase == "step"]
    whole = sum(p.nbytes for p in model.parameters())
    assert max(held) == pytest.approx(sets * whole, abs=0.02 * whole)


def test_a_parameter_without_a_gradient_has_no_states():
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.zeros(5000)))
    for cfg in (None, "balanced"):
        optimizer = torch.optim.AdamW(model.parameters())
        predicted = predict(model, optimizer, torch.ones(2, 64), cfg)
        measured = measure(model, optimizer, torch.ones(2, 64), cfg)
        for name in ("optimizer states", "weights"):
            assert predicted.peak.parts[name] == measured.peak.parts[name]


OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
    "4-bit": AdamW4bit,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_of_any_optimizer_is_simulated(name):
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    predicted, measured = (run(model, optimizer, torch.ones(2, 64)) for run in (predict, measure))
    for phase in ("forward", "step"):
        sides = [
            max(m.nbytes for m in t.moments if m.phase == phase) for t in (predicted, measured)
        ]
        # The C++ step's table is not simulated: a row of int64 fields and float32 scalars each.
        table = len([*model.parameters()]) * (8 * FIELDS + 4 * COUNT)
        assert sides[0] == pytest.approx(sides[1], abs=table)


def test_lbfgs_is_measured_only():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with pytest.raises(ValueError, match=r"LBFGS.*measure a real step"):
        predict(model, optimizer, torch.ones(2, 64))
    weights = sum(p.nbytes for p in model.parameters())
    assert measure(model, optimizer, torch.ones(2, 64)).peak.nbytes > 3 * weights


def test_two_passes_of_clipping_are_simulated():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    cfg = {**OFF, "gradients": "release", "release": {"clip": "two_pass"}}
    predicted = predict(model, optimizer, torch.ones(32, 64), cfg)
    real = measure(model, optimizer, torch.ones(32, 64), cfg).peak.nbytes
    kept = torch.get_rng_state().nbytes  # for the second pass; no op allocates it
    assert predicted.peak.nbytes == pytest.approx(real - kept, abs=NUMBERS)


def test_a_fake_model_is_as_a_real_one_and_neither_is_changed():
    model, optimizer, batch = net_case()
    real = predict(model, optimizer, batch, "balanced").peak
    with FakeTensorMode():
        fake = Net()
        fake_optimizer, fake_batch = torch.optim.AdamW(fake.parameters()), torch.ones(4, 3, 32, 32)
    assert predict(fake, fake_optimizer, fake_batch, "balanced").peak == real
    assert not optimizer.state
    assert not fake_optimizer.state
    assert not any(hasattr(model, name) for name in ("_memtrain",))
    assert all(not m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="has no data"):
        measure(fake, fake_optimizer, fake_batch)


def test_states_that_exist_are_not_made_anew():
    model, optimizer, batch = net_case()
    fresh = predict(model, optimizer, batch)
    model(batch).sum().backward()
    optimizer.step()
    assert predict(model, optimizer, batch) == fresh


def test_measuring_leaves_everything_as_it_was():
    model, optimizer, batch = net_case()
    model(batch).sum().backward()
    optimizer.step()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    moment = optimizer.state[model.qkv.weight]["exp_avg"].clone()
    gradient = model.qkv.weight.grad
    random = torch.get_rng_state()
    measure(model, optimizer, batch, "all_four")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.qkv.weight.dtype == torch.float32
    assert model.qkv.weight.grad is gradient
    assert torch.equal(optimizer.state[model.qkv.weight]["exp_avg"], moment)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_audit_has_timelines_where_they_are_asked_for():
    model, optimizer, batch = net_case()
    report = audit(model, batch, optimizer=optimizer, peak=True, measure=True)
    assert report.timeline.peak.nbytes == report.measured.peak.nbytes
    assert report.planned_timeline.peak.nbytes == report.planned_measured.peak.nbytes
    assert report.planned_timeline.peak.nbytes < report.timeline.peak.nbytes
    totals = report.totals()
    for timeline, side in ((report.timeline, "plain"), (report.planned_timeline, "planned")):
        parts = timeline.moments[-1].parts
        for name in ("weights", "gradients", "optimizer states"):
            assert parts[name] == getattr(totals[name], side)
    plain = audit(model, batch, optimizer=optimizer)
    assert plain.timeline is plain.planned_timeline is plain.measured is None


def test_what_is_recomputed_is_corrected_for_cuda_too():
    options = StepOptions(device="cuda", autocast=torch.bfloat16)
    for again in (False, True):
        timeline = predict(*net_case(again), None, options)
        assert any(m.label.startswith("recomputing block.1") for m in timeline.moments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_the_allocators_peak_is_the_predicted_one(name):
    model, _, batch = net_case()
    model, batch = model.cuda(), batch.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = predict(model, optimizer, batch, CONFIGS[name])
    measured = measure(model, optimizer, batch, CONFIGS[name])
    held = predicted.peak.parts["workspaces"]
    assert predicted.peak.nbytes - held == pytest.approx(measured.peak.nbytes, rel=0.03, abs=held)


def with_loss(rows, *layers):
    """Layers whose outputs are the logits of a cross-entropy over so many rows."""
    labels = torch.zeros(rows, dtype=torch.long)

    class WithLoss(nn.Sequential):
        def forward(self, x):
            return F.cross_entropy(super().forward(x), labels)

    return WithLoss(*layers)


def most_temporaries(model, batch, device, phase):
    """The most bytes of temporaries at a moment of a predicted phase, under `balanced`."""
    optimizer = torch.optim.SGD(model.parameters())
    options = StepOptions(loss=lambda y: y, device=device)
    moments = predict(model, optimizer, batch, "balanced", options).moments
    return max(m.parts.get("temporaries", 0) for m in moments if m.phase == phase)


@pytest.mark.parametrize(("device", "size"), [(None, "_PIECE"), ("cuda", "_PIECE_CUDA")])
def test_pieces_of_a_cross_entropy_are_predicted_from_few(device, size, monkeypatch):
    """All pieces but the first and the last two are equal: peaks and bytes are those of all."""
    model = with_loss(1000, nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    options = StepOptions(loss=lambda y: y, device=device)
    monkeypatch.setattr(cross_entropy, size, 64 * 512)  # 64 rows, the last ones 40

    def reported():
        timeline = predict(model, optimizer, torch.ones(1000, 32), "balanced", options)
        saved = [m.parts.get("saved activations", 0) for m in timeline.moments]
        forward = [m.nbytes for m in timeline.moments if m.phase == "forward"]
        return timeline.peak, max(saved), max(forward)

    few = reported()
    monkeypatch.setattr(cross_entropy, "_differing", range)
    assert few == reported()
    monkeypatch.setattr(cross_entropy, size, 1000 * 512)
    assert few[-1] < reported()[-1] - 2**20  # a log-softmax of 2 MB


def test_a_cuda_step_takes_logits_by_eighths_at_most(monkeypatch):
    """Small ones would else be one piece, whose log-softmax takes as much as all of them."""
    model, logits = with_loss(1000, nn.Linear(32, 512)), 4 * 1000 * 512
    monkeypatch.setattr(cross_entropy, "_PIECE", 512)

    def most(pieces):
        monkeypatch.setattr(cross_entropy, "_PIECES_CUDA", pieces)
        return most_temporaries(model, torch.ones(1000, 32), "cuda", "forward")

    assert most(8) < logits * (1 + 2 / 8)  # themselves, a piece and what quantises it
    assert most(1) > logits * 2
