"""Casts and reordered copies of what is kept anyway hold no bytes of their own."""

import pytest
import torch
from torch import nn

from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options
from memtrain.activations.saved.cache import Copy
from memtrain.activations.saved.origin import storage_id
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import Group, Identity
from memtrain.kernels.dispatch import backend
from memtrain.kernels.group import group

WIDTH, BATCH = 64, 96


def intercept(model, compressor, records=None):
    on_saved = list.copy if records is None else records.extend
    options = Options(min_elements=64)
    Interception(
        model, lambda site: compressor, options=options, seed=0, on_saved=on_saved
    ).attach()


def two_layers(*, frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight.requires_grad_(not frozen)
    return model, torch.randn(BATCH, WIDTH)


def forward(model, x):
    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):  # it holds its copies to its end
            return model(x).sum()

    return saved_nbytes(run, exclude=[x, *model.parameters()])


def gradients(model, x):
    forward(model, x)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_s_copies_of_weights_are_cast_again(frozen):
    model, x = two_layers(frozen=frozen)
    plain, loss = forward(model, x)
    del loss
    expected = gradients(model, x)
    model.zero_grad()
    records = []
    intercept(model, Identity(), records)
    held, loss = forward(model, x)
    loss.backward()
    # the first layer's input needs no gradient, so its weight is not saved
    assert plain - held == WIDTH * WIDTH * 2
    assert [r.nbytes - r.planned for r in records if "cast again" in r.reason] == [WIDTH**2 * 2]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_frozen_weight_s_copy_is_not_quantised():
    model, x = two_layers(frozen=True)
    x.requires_grad_()
    gradients(model, x)
    expected, x.grad = x.grad, None
    records = []
    intercept(model[2], Group(bits=2), records)
    gradients(model, x)
    assert torch.equal(x.grad, expected)
    assert not any(r.compressor for r in records)


def test_a_weight_that_changed_since_the_forward_is_refused():
    model, x = two_layers()
    intercept(model, Identity())
    _, loss = forward(model, x)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Fn(nn.Module):
    """A model of any function, and weights of both precisions."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.low = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / 8)
        self.high = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x):
        return self.function(self, x @ self.low).float().sum()


def adapters(model, h):
    """Three adapters in float32 upon one bfloat16 tensor, as PEFT casts their input."""
    return sum((h.float() @ model.high) * (k + 1) for k in range(3))


def turned(model, h):
    """A product saves `h`; another one its rows in another order."""
    return (h @ model.low) + h.view(4, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH) @ model.low


def changed(model, h):
    """As `turned`, but `h` changes after it was copied."""
    h = h * 1
    y = h.t().contiguous()
    h.mul_(3)
    return h @ model.low + (y.t() @ model.low)


@pytest.mark.parametrize(("function", "payloads"), [(adapters, 1), (turned, 1), (changed, 2)])
def test_copies_share_their_source_s_payload(function, payloads):
    torch.manual_seed(0)
    model, x = Fn(function), torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)
    loss = model(x)
    loss.backward()
    expected = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    records = []
    intercept(model, Group(bits=8), records)
    model(x).backward()
    named = [r for r in records if r.compressor]
    assert len([r for r in named if r.planned]) == payloads
    assert len(named) == {adapters: 3, turned: 2, changed: 2}[function]
    for name, grad in expected.items():
        found = dict(model.named_parameters())[name].grad.double()
        # 8 bits of a group's range, and a bfloat16 sum
        assert torch.nn.functional.cosine_similarity(found.ravel(), grad.ravel(), dim=0) > 0.9999


def test_under_autocast_the_output_of_a_norm_is_computed_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(BATCH, WIDTH)
    records = []
    intercept(model, Group(bits=4), records)
    forward(model, x)[1].backward()
    derived = [r for r in records if r.site.module == "2" and r.site.tensor == "input"]
    assert [(r.compressor, r.planned) for r in derived] == [("derived", 0)]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 3 * WIDTH)

    def forward(self, x):
        three = self.qkv(x).split(WIDTH, dim=2)
        query, key, value = (t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in three)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_triton_quantises_queries_keys_and_values_where_they_lie(monkeypatch):
    """No contiguous copy of any, and the same codes as of one."""
    pytest.importorskip("triton")
    x, shapes, results = torch.randn(2, 24, 32), [], []
    plain = group.group_quantize
    monkeypatch.setattr(
        group,
        "group_quantize",
        lambda x, *rest: shapes.append((x.shape, x.is_contiguous())) or plain(x, *rest),
    )
    for reads in (True, False):
        monkeypatch.setattr(Group, "reads_rows", reads)
        torch.manual_seed(0)
        model = Attention()
        intercept(model, Group(bits=4, group_size=WIDTH))
        with backend("triton"):
            model(x).square().sum().backward()
        results.append(model.qkv.weight.grad)
    three = shapes[: len(shapes) // 2].count(((48, WIDTH), False))
    assert three == 3
    assert shapes[len(shapes) // 2 :].count(((48 * WIDTH,), True)) >= 3
    assert torch.equal(*results)


class Scores(nn.Module):
    """Attention's scores as Bart's kin write them: a copy's source is gone once it is made."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        queries, keys = self.heads(self.queries(x)), self.heads(self.keys(x))
        return torch.bmm(queries, keys.transpose(1, 2)).square().sum()

    @staticmethod
    def heads(x):
        return (x / 4).view(4, -1, 4, WIDTH // 4).transpose(1, 2).reshape(16, -1, WIDTH // 4)


def test_a_copy_whose_source_is_gone_is_not_given_another_s_payload():
    torch.manual_seed(0)
    model, x = Scores(), torch.randn(BATCH, WIDTH)
    for p in model.parameters():
        nn.init.normal_(p)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    intercept(model, Group(bits=8))
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            assert torch.nn.functional.cosine_similarity(p.grad.ravel(), grad.ravel(), dim=0) > 0.99


def test_no_storage_takes_the_number_of_a_copy_s_source():
    x = torch.ones(BATCH)
    copy = Copy.of(x, torch.clone)
    del x
    others = [torch.ones(BATCH) for _ in range(100)]
    assert copy.storage not in map(storage_id, others)


class Cast(nn.Module):
    """Casts its weight itself; then the copy, or the weight, is written to."""

    def __init__(self, changed):
        super().__init__()
        self.weight, self.changed = nn.Parameter(torch.randn(WIDTH, WIDTH)), changed

    def forward(self, x):
        copy = self.weight.to(torch.bfloat16)
        with torch.no_grad():
            if self.changed == "copy":
                copy[copy.abs() < 0.5] = 0
            elif self.changed == "weight":
                self.weight.mul_(2)
        return x @ copy


@pytest.mark.parametrize("changed", ["copy", "weight", ""])
def test_a_copy_that_differs_from_its_weight_is_kept(changed):
    x, grads = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16), []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model, records = Cast(changed), []
        if wrapped:
            intercept(model, Identity(), records)
        given = x.clone().requires_grad_()
        model(given).square().sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
    assert any("cast again" in record.reason for record in records) == (not changed)


class Streamed(nn.Linear):
    """Its frozen weight comes from elsewhere, in each forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(self.weight * 1)
        return super().forward(x)


def test_a_frozen_weight_that_is_written_in_the_forward_is_no_activation():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Streamed(WIDTH, WIDTH))
    model[1].requires_grad_(False)
    records = []
    intercept(model, Group(bits=4), records)
    _, loss = forward(model, torch.randn(BATCH, WIDTH))
    loss.backward()
    assert not any(record.compressor for record in records if record.site.module == "1")


class Memory(nn.Module):
    """Reads frozen keys of float32 and values, without a gradient, of the same shape."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(1, 4, 32, 16), requires_grad=False)
        self.query = nn.Linear(16, 16)

    def forward(self, x, values):
        query = self.query(x)
        return nn.functional.scaled_dot_product_attention(query, self.keys, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_frozen_weight_is_not_taken_for_another_tensor_s_source(dtype):
    torch.manual_seed(0)
    model, (x, values) = Memory(), torch.randn(2, 1, 4, 32, 16)
    grads = []
    for wrapped in (False, True):
        if wrapped:
            intercept(model, Identity())
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(x, values.to(dtype)).float().square().sum().backward()
        grads.append(model.query.weight.grad)
    assert torch.equal(*grads)


def test_frozen_weights_that_the_model_does_not_own_are_kept():
    torch.manual_seed(0)
    teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model, records = Fn(lambda own, h: teacher(h.float())), []
    intercept(model, Group(bits=4), records)
    model(torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)).backward()
    assert not any(record.compressor for record in records)


@pytest.mark.parametrize(
    "use",
    [
        lambda h, c: h + c.float(),
        lambda h, c: h.float() + c.t().contiguous().t(),
        lambda h, c: h * 2 + c.double().float(),
    ],
)
def test_a_copy_of_a_tensor_of_inference_mode_is_one_of_no_one(use):
    with torch.inference_mode():
        frozen = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model, x = Fn(lambda own, h: use(h, frozen) @ own.high), frozen.clone()
    model(x).backward()
    intercept(model, Group(bits=4))
    model(x).backward()
