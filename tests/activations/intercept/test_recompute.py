"""Recomputed modules: the gradients of plain training to the last bit, only their inputs kept."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.activations.intercept.recompute import blocks_of, recomputed
from memtrain.audit.live_storages import saved_nbytes
from memtrain.config.sources import ActivationRule, Activations, Config


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.up, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.2)

    def forward(self, x, *, scale=None):
        y = self.down(self.act(self.up(self.norm(x))))
        if scale is not None:
            y = y * scale
        return x + self.drop(self.batch(y))


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.h = nn.ModuleList(Block() for _ in range(depth))
        self.broken = False

    def forward(self, x):
        x = self.first(x)
        scale = x.mean() + 2
        for block in self.h:
            x = block(x, scale=scale)
        if self.broken:
            raise RuntimeError("out of luck")
        return self.last(x)


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def make():
    torch.manual_seed(0)
    return Net()


KEEP, EXACT = [], [ActivationRule(compressor="identity")]
LOSSY = [
    ActivationRule(op="gelu", compressor={"name": "derivative"}),
    ActivationRule(compressor={"name": "group"}),
]


def config(patterns, rules=EXACT, inputs="keep", **others):
    own = Activations(rules=rules, recompute=list(patterns), recompute_inputs=inputs)
    return Config(activations=own, **others)


def wrapped(patterns=("h.*",), rules=EXACT, **others):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    return memtrain.wrap(model, optimizer, config(patterns, rules, **others))


def gradients(model, passes=1):
    torch.manual_seed(5)
    for _ in range(passes):
        model(X).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all((a is b) if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "patterns", [["h.*"], ["h.1"], ["h.0", "h.2.act"], ["*.norm", "first"], [""]]
)
@pytest.mark.parametrize("rules", [EXACT, KEEP], ids=["exact", "keep"])
def test_gradients_and_running_statistics_are_those_of_plain_training(patterns, rules):
    plain, (model, _) = make(), wrapped(patterns, rules)
    assert same(gradients(model, passes=2), gradients(plain, passes=2))
    assert same(model.buffers(), plain.buffers())
    assert torch.equal(torch.rand(3), (gradients(plain, 2), torch.rand(3))[1])


def test_under_autocast_too():
    plain, (model, _) = make(), wrapped()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = []
        for net in (plain, model):
            torch.manual_seed(3)
            losses.append(net(X).float().square().mean())
    for loss in losses:  # outside, as is the custom
        loss.backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


def test_only_the_inputs_are_kept():
    plain, (model, _) = make(), wrapped(rules=KEEP)
    before, _ = saved_nbytes(lambda: plain(X), exclude=plain.buffers())
    after, _ = saved_nbytes(lambda: model(X), exclude=model.buffers())
    rows = memtrain.plan_of(model).entries("activation")
    starts = [row for row in rows if " / recompute / " in row.site]
    assert sum(row.planned for row in starts) == 3 * 64 * 64 * 4 + 4
    assert after < 0.25 * before
    # the scalar mean that makes the scale, and the random states, are small
    assert abs(after - sum(row.planned for row in rows)) <= 64


def test_the_audit_reports_it():
    model = make()
    cfg = config(["h.*"], KEEP)
    report = memtrain.audit(model, X, cfg)
    rows = {row.name: row for row in report.rows}
    inside = rows["h.0.act / gelu / input"]
    assert (inside.plain, inside.planned, inside.compressor) == (64 * 256 * 4, 0, "recompute")
    total = report.totals()["saved activations"]
    assert total.planned == 4 * 64 * 64 * 4 + 4
    assert total.plain > 4 * total.planned


def test_the_rest_is_compressed_as_planned():
    model, _ = wrapped(["h.0", "h.1"], rules=LOSSY)
    gradients(model)
    rows = {row.site: row for row in memtrain.plan_of(model).entries("activation")}
    assert rows["h.0 / recompute / input"].compressor == ""
    assert "h.0.act / gelu / input" not in rows
    assert rows["h.2.act / gelu / input"].compressor == "payload"
    exact = gradients(make())
    noisy = gradients(model)
    cosine = nn.functional.cosine_similarity(
        torch.cat([g.flatten() for g in exact]), torch.cat([g.flatten() for g in noisy]), dim=0
    )
    assert 0.98 < cosine < 1


def test_buffers_are_written_once_also_past_the_version_counter():
    class Codebook(nn.Linear):
        def __init__(self):
            super().__init__(32, 32)
            self.register_buffer("used", torch.zeros(32))
            self.register_buffer("mask", torch.ones(1).expand(32))  # takes no writes

        def forward(self, x):
            self.used.data.add_(x.detach().mean(0))
            return super().forward(x) * self.mask

    model = nn.Sequential(nn.Linear(32, 32), Codebook())
    memtrain.wrap(model, torch.optim.SGD(model.parameters()), config(["1"]))
    model(X).sum().backward()
    assert torch.equal(model[1].used, model[0](X).mean(0))


def test_two_forwards_before_a_backward_and_a_graph_kept():
    found = []
    for net in (make(), wrapped()[0]):
        torch.manual_seed(5)
        a, b = net(X), net(X.flip(0))
        loss = (a * b).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    assert same(*found)


def test_nothing_is_done_without_gradients():
    model, _ = wrapped()
    model.eval()
    with torch.no_grad():
        kept, _ = saved_nbytes(lambda: model(X).sum())
    assert kept <= 4
    assert torch.equal(model(X), make().eval()(X))


def test_a_failed_forward_leaves_no_trace():
    plain, (model, _) = make(), wrapped()
    model.broken = True
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(X)
    model.broken = False
    model.h[1].up.weight.data, weight = torch.ones(3, 3), model.h[1].up.weight.data
    with pytest.raises(RuntimeError):
        model(X)
    model.h[1].up.weight.data = weight
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert same(gradients(model), gradients(plain))


def test_inside_the_users_own_checkpointing():
    class Own(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.h:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return self.last(x)

    for reentrant in (True, False):
        plain, model = Own(), Own()
        model.load_state_dict(plain.state_dict())
        plain.reentrant = model.reentrant = reentrant
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = memtrain.wrap(model, optimizer, config(["h.*"]))
        assert same(gradients(model), gradients(plain))


def groups(bits):
    return {"name": "group", "bits": bits}


def starts(model):
    rows = memtrain.plan_of(model).entries("activation")
    return [row for row in rows if " / recompute / " in row.site]


def test_the_gradients_error_is_a_multiple_of_the_inputs_steps():
    exact = torch.cat([g.flatten() for g in gradients(make())])
    errors = []
    for bits in (4, 8):
        model, _ = wrapped(rules=KEEP, inputs=groups(bits))
        noisy = torch.cat([g.flatten() for g in gradients(model)])
        errors.append(float((noisy - exact).norm()))
    # Steps are 17 times as long. The error is one draw's: a factor of 2 either way.
    assert 17 / 2 < errors[0] / errors[1] < 17 * 2


def test_the_value_is_exact_whatever_holds_the_inputs():
    values = []
    for model in (make(), wrapped(rules=KEEP, inputs=groups(2))[0]):
        torch.manual_seed(5)
        values.append(model(X))
    assert torch.equal(*values)


def test_compressed_inputs_are_predicted_and_carried_by_a_plan_file(tmp_path):
    model, cfg = make(), config(["h.*"], KEEP, inputs=groups(8))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = memtrain.make_plan(model, optimizer, cfg, batch=X)
    plan.save(tmp_path / "plan.yaml")
    model, _ = memtrain.wrap(model, optimizer, tmp_path / "plan.yaml")
    after, _ = saved_nbytes(lambda: model(X), exclude=model.buffers())
    planned = sum(row.planned for row in plan.entries("activation"))
    # the scalar mean that makes the scale, and the random states, are small
    assert 3 * 64 * 64 < planned < 4 * 64 * 64 * 3
    assert abs(after - planned) <= 64


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        ({"name": "derivative"}, ValueError, "allowed: keep, or a compressor of any numbers"),
        ({"name": "group", "bits": "auto"}, ValueError, "allowed: keep, or a compressor of any"),
        ({"name": "group", "bits": 9}, ValueError, "bits=9"),
        ({"name": "grup"}, ValueError, "group"),
        (8, TypeError, "8"),
    ],
    ids=["derivative", "auto", "nine", "typo", "number"],
)
def test_inputs_that_cannot_be_held_so_are_an_error_before_anything_changes(inputs, error, said):
    model, cfg = make(), config(["h.*"], inputs=inputs)
    with pytest.raises(error, match=said):
        memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    assert not any(m._forward_hooks for m in model.modules())


def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
        made = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(made).train()
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 32, "num_heads": 2, "num_layers": 2}
    made = transformers.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(made).train()


TOKENS = torch.arange(2 * 32).view(2, 32)


def step(model):
    torch.manual_seed(5)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_cache_of_keys_and_values_is_not_filled_twice(kind):
    plain, model = hugging_face(kind), hugging_face(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = memtrain.wrap(model, optimizer, config(["@blocks"], KEEP))
    assert same(step(model), step(plain))
    assert model(input_ids=TOKENS, labels=TOKENS).past_key_values.get_seq_length() == 0
    with torch.no_grad():  # where nothing is recomputed it is filled as ever
        assert model(input_ids=TOKENS, labels=TOKENS).past_key_values.get_seq_length() == 32


def test_layers_with_a_prefix_in_their_cache_are_not_recomputed():
    model = hugging_face("gpt2").eval()
    with torch.no_grad():
        prefix = model(input_ids=TOKENS[:, :8]).past_key_values
    expected = model(input_ids=TOKENS[:, 8:], past_key_values=copy.deepcopy(prefix)).logits
    model, _ = memtrain.wrap(
        model, torch.optim.AdamW(model.parameters()), config(["@blocks"], KEEP)
    )
    found = model(input_ids=TOKENS[:, 8:], past_key_values=prefix)
    assert torch.equal(found.logits, expected)
    assert found.past_key_values.get_seq_length() == 32
    assert not starts(model)


def test_blocks_are_what_the_model_repeats():
    def layer():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    shared = layer()
    model = nn.Sequential(
        layer(),
        nn.ModuleList([shared, Block(), shared, nn.Sequential(layer(), layer())]),
        nn.Sequential(nn.Flatten(), nn.Identity()),
        nn.Linear(4, 4),
    )
    assert blocks_of(model) == ["0", "1.0", "1.1", "1.3"]
    assert recomputed(model, ["@blocks"]) == ["0", "1.0", "1.1", "1.3"]
    assert recomputed(make(), ["@blocks", "last"]) == ["last", "h.0", "h.1", "h.2"]


def test_a_model_without_blocks_is_compressed_and_the_plan_lists_what_matched_nothing():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(32, 64)
    report = memtrain.audit(model, x, "checkpointed")
    assert any("@blocks: the model repeats no module" in rule for rule in report.unmatched)
    model, optimizer = memtrain.wrap(
        model, torch.optim.AdamW(model.parameters()), "checkpointed", batch=x
    )
    plan = memtrain.plan_of(model)
    assert "@blocks: the model repeats no module" in plan.listing()
    assert [e.compressor for e in plan.entries("activation") if "relu" in e.site] != [""]
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="matches no module"):  # a path that is not there
        recomputed(model, ["h.*"])


def test_the_preset_keeps_eight_bits_of_each_blocks_input():
    model = make()
    model, _ = memtrain.wrap(model, torch.optim.AdamW(model.parameters()), "checkpointed")
    gradients(model)
    held = 64 * 64 + 64 * 64 // 256 * 4
    assert [row.planned for row in starts(model) if row.compressor] == [held] * 3


def test_copies_pickles_and_unwrap():
    model, optimizer = wrapped()
    expected = gradients(make())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(twin), expected)
    output = model(X)
    model, _ = memtrain.unwrap(model, optimizer)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    output.sum().backward()  # a graph that lives on still recomputes
    assert type(model).forward is Net.forward
    assert model.state_dict().keys() == make().state_dict().keys()


def test_of_nested_modules_the_outermost():
    model = make()
    assert recomputed(model, ["h*"]) == ["h.0", "h.1", "h.2"]
    assert recomputed(model, ["h.0.*"])[:2] == ["h.0.norm", "h.0.batch"]
    assert recomputed(model, ["*"]) == [""]
    assert recomputed(model, []) == []


@pytest.mark.parametrize("pattern", ["k.*", "h", "h.7"])
def test_a_pattern_without_modules_is_an_error_before_anything_changes(pattern):
    model, cfg = make(), config([pattern])
    with pytest.raises(ValueError, match="matches no module") as caught:
        memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)
    assert repr(pattern) in str(caught.value)
    assert not hasattr(model, "_memtrain")
    assert not any(m._forward_hooks for m in model.modules())
