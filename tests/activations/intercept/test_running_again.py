"""What checkpointed modules save when they run again is compressed as it would be without that."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain
from memtrain.activations.intercept.reentrancy import top_hooks
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.measure import measure
from memtrain.audit.peak.predict import predict
from memtrain.config.sources import ActivationRule, Activations, Config
from memtrain.kernels.dispatch import backend

LOSSY = [
    ActivationRule(op="gelu", compressor={"name": "derivative"}),
    ActivationRule(compressor={"name": "group", "bits": 4}),
]
KEEP, EXACT = [], [ActivationRule(compressor="identity")]


class Block(nn.Module):
    """Attention and an MLP, of a width that fills no group, with dropout and batch statistics."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act = nn.Linear(width, 4 * width), nn.GELU()
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.2)
        self.batch = nn.BatchNorm1d(width)

    def forward(self, x, mask=None):
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2)
            for y in self.qkv(self.ln_1(x)).split(self.width, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        y = self.down(self.act(self.up(self.ln_2(x))))
        return x + self.drop(self.batch(y.mT).mT)


class GPT(nn.Module):
    """A small GPT whose head is its embedding, and whose blocks may be one block."""

    def __init__(self, depth=2, width=50, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(65, width)
        blocks = [Block(width)] * depth if shared else [Block(width) for _ in range(depth)]
        self.h, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, 65, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        for block in self.h:
            x = block(x, mask=mask)
        return self.head(self.norm(x))


TOKENS = torch.randint(0, 65, (3, 31), generator=torch.Generator().manual_seed(1))


def config(recompute, rules=LOSSY, inputs="keep", saves="rules", **others):
    own = Activations(
        rules=rules, recompute=recompute, recompute_inputs=inputs, recompute_saves=saves
    )
    return Config(activations=own, **others)


def wrapped(recompute=("@blocks",), rules=LOSSY, model=None, **others):
    model = GPT() if model is None else model
    cfg = config(list(recompute), rules, **others)
    return memtrain.wrap(model, torch.optim.AdamW(model.parameters()), cfg)[0]


def gradients(model, passes=1, autocast=False):
    torch.manual_seed(5)
    for _ in range(passes):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = model(TOKENS)
        y.float().square().mean().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all((a is b) if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def cosine(ours, theirs):
    a, b = (torch.cat([g.double().flatten() for g in found]) for found in (ours, theirs))
    return float(nn.functional.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize(
    ("patterns", "autocast"), [(["@blocks"], False), (["h.1"], True)], ids=["float32", "autocast"]
)
def test_gradients_are_those_of_the_same_rules_without_running_again(patterns, autocast):
    plain, beside, model = GPT(), wrapped([]), wrapped(patterns)
    exact = gradients(plain, autocast=autocast)
    for passes in (1, 1, 2):  # later ones by what the first has settled; two accumulate
        ours = gradients(model, passes, autocast)
        assert same(ours, gradients(beside, passes, autocast))
        assert same(model.buffers(), beside.buffers())
        if passes == 1:
            assert 0.98 < cosine(ours, exact) < 1


@pytest.mark.parametrize(
    ("patterns", "rules"),
    [(["@blocks"], EXACT), (["h.0.act", "h.1.ln_*"], KEEP), ([""], EXACT)],
    ids=["blocks", "parts", "the model"],
)
def test_the_exact_twin_is_plain_training(patterns, rules):
    plain, model = GPT(), wrapped(patterns, rules)
    for _ in range(2):
        assert same(gradients(model, passes=2), gradients(plain, passes=2))
    assert same(model.buffers(), plain.buffers())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_no_whole_groups_ask_once_for_what_they_saved(norm):
    """As on CUDA, where a kernel is tried for the backward that serves whole groups only."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(50, 50), norm(50)), nn.Linear(50, 50))
    model, x, cfg = copy.deepcopy(plain), torch.randn(256, 50), config(["0"])
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = predict(model, optimizer, x, cfg, StepOptions(device="cuda"))
    assert predicted.peak.phase == "backward"
    memtrain.wrap(model, optimizer, cfg)
    with backend("reference"):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    ours, exact = ([p.grad for p in one.parameters()] for one in (model, plain))
    assert 0.98 < cosine(ours, exact) < 1


def test_the_value_is_exact_and_evaluation_is_as_it_was():
    plain, model = GPT(), wrapped(inputs={"name": "group", "bits": 2})
    for training in (True, False):
        torch.manual_seed(5)
        expected = plain.train(training)(TOKENS)
        torch.manual_seed(5)
        assert torch.equal(model.train(training)(TOKENS), expected)
        with torch.no_grad():
            assert torch.equal(model.eval()(TOKENS), plain.eval()(TOKENS))


def held_again(timeline):
    """Bytes that a block's run again has left when the backward has passed its last dropout."""
    last = "backward of h.1.batch / batch_norm"
    return next(m for m in timeline.moments if m.label == last).parts["recomputed activations"]


@pytest.mark.parametrize(
    "release", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["kept", "released"]
)
def test_one_modules_payloads_are_there_at_once_as_predicted(release):
    held = {}
    for saves in ("keep", "rules"):
        model = GPT(width=64)
        cfg = config(["@blocks"], saves=saves, gradients="release" if release else "keep")
        optimizer = torch.optim.AdamW(model.parameters())
        predicted = predict(model, optimizer, TOKENS, cfg)
        held[saves] = held_again(predicted)
    measured = measure(model, optimizer, TOKENS, cfg)
    assert predicted.peak.nbytes == pytest.approx(measured.peak.nbytes, rel=0.03)
    plan = memtrain.make_plan(model, optimizer, config([]), batch=TOKENS)
    rows = [row for row in plan.entries("activation") if row.site.startswith("h.1")]
    planned = sum(row.planned for row in rows)
    assert held["rules"] <= planned
    assert held["rules"] < 0.15 * held["keep"]


def test_one_module_that_runs_twice_in_a_forward():
    plain, model = GPT(shared=True), wrapped(model=GPT(shared=True))
    ours = gradients(model)
    assert 0.98 < cosine(ours, gradients(plain)) < 1
    assert same(gradients(wrapped(model=GPT(shared=True))), ours)
    exact = wrapped(rules=EXACT, model=GPT(shared=True))
    assert same(gradients(exact), gradients(GPT(shared=True)))


def test_a_graph_kept_gives_the_same_gradients_again():
    model = wrapped()
    loss = model(TOKENS).square().mean()
    found = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert same(*found)


def test_two_forwards_before_a_backward():
    found = []
    for recompute in ([], ["@blocks"]):
        model = wrapped(recompute)
        torch.manual_seed(5)
        a, b = model(TOKENS), model(TOKENS.flip(0))
        (a * b).mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


class Penalised(nn.Module):
    """A block that takes a gradient through a part of itself while it runs."""

    def __init__(self, within):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.first, self.within = Block(50), nn.Linear(50, 50), within

    def forward(self, x):
        x = self.first(x)
        if not self.within:
            y = self.block(x)
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y + slope
        (slope,) = torch.autograd.grad(self.block(x).sum(), x)
        return self.block(x) + slope


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("pattern", ["block", ""])
def test_a_backward_inside_the_forward(within, pattern):
    x, found = torch.randn(3, 31, 50), []
    for model in (Penalised(within), wrapped([pattern], EXACT, Penalised(within))):
        torch.manual_seed(5)
        y = model(x)
        y.square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert same(*found)


class Own(GPT):
    """Checkpoints a part of each block, or all of them, itself."""

    def __init__(self, reentrant, part):
        super().__init__()
        self.reentrant, self.part = reentrant, part
        for block in self.h:
            if part:
                block.get_submodule("act").register_forward_hook(self.again)

    def again(self, act, args, output):
        return checkpoint(nn.functional.gelu, *args, use_reentrant=self.reentrant)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x) if self.part else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("part", [True, False], ids=["inside", "around"])
def test_torchs_own_checkpointing_inside_and_around(part):
    plain, model = Own(False, part), wrapped(rules=EXACT, model=Own(False, part))
    assert same(gradients(model), gradients(plain))
    lossy = wrapped(model=Own(False, part))
    found = gradients(lossy)
    assert 0.98 < cosine(found, gradients(plain)) < 1


def test_keys_go_on_where_a_run_was_saved():
    whole, half = wrapped(), wrapped()
    expected = [gradients(whole) for _ in range(3)]
    gradients(half)
    state = memtrain.state_dict(half)
    resumed = wrapped()
    resumed.load_state_dict(half.state_dict())
    memtrain.load_state_dict(resumed, state)
    assert [same(gradients(resumed), each) for each in expected[1:]] == [True, True]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_broken_off_leaves_no_trace(error):
    def fail(*_):
        raise error

    model = wrapped()
    handle = model.get_submodule("h.1.act").register_forward_hook(fail)
    with pytest.raises(error):
        gradients(model)
    handle.remove()
    loss = model(TOKENS).sum()
    assert top_hooks() is None
    if error is ValueError:
        handle = model.get_submodule("h.1.act").register_forward_hook(fail)
        with pytest.raises(error):
            loss.backward()
        handle.remove()
        model.zero_grad()
    assert top_hooks() is None
    beside = wrapped([])
    for _ in range(2):
        gradients(beside)
    model.load_state_dict(beside.state_dict())
    assert same(gradients(model), gradients(beside))


def test_copies_and_pickles():
    model = wrapped()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = gradients(model)
    for twin in twins:
        assert same(gradients(twin), expected)


def test_another_threads_forward_in_between_is_an_error():
    model = wrapped()
    loss, began, end = model(TOKENS).sum(), threading.Event(), threading.Event()

    def wait(*_):
        began.set()
        end.wait(60)

    handle = model.get_submodule("norm").register_forward_hook(wait)
    other = threading.Thread(target=lambda: model(TOKENS))
    other.start()
    began.wait(60)
    try:
        with pytest.raises(RuntimeError, match=r"activations\.recompute_saves=keep"):
            loss.backward()
    finally:
        end.set()
        other.join()
        handle.remove()
    gradients(model)


class Forces(nn.Module):
    """Gives an energy's gradient, by a thread beside its own as by autograd's for CUDA."""

    def __init__(self, beside):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)]
        self.h, self.energy, self.beside = nn.ModuleList(layers), nn.Linear(64, 1), beside

    def forward(self, x):
        x = y = x.clone().requires_grad_()
        for layer in self.h:
            y = y + layer(y)
        energy, found = self.energy(y).sum(), []

        def differentiate():
            found.extend(torch.autograd.grad(energy, x, retain_graph=True))

        if self.beside:
            thread = threading.Thread(target=differentiate)
            thread.start()
            thread.join()
        else:
            differentiate()
        return energy, found[0]


@pytest.mark.parametrize("rules", [LOSSY, EXACT], ids=["lossy", "exact"])
def test_a_forward_that_differentiates_may_wait_for_another_thread(rules):
    def run(model):
        energy, forces = model(torch.linspace(-1, 1, 128 * 64).view(128, 64))
        energy.backward()
        return [forces, *[p.grad for p in model.parameters()]]

    plain, within, beside = Forces(False), *(wrapped(rules=rules, model=Forces(b)) for b in (0, 1))
    for _ in range(2):
        exact, expected = run(plain), run(within)
        assert same(run(beside), expected)
        assert rules != EXACT or same(exact, expected)


def test_any_rule_serves_and_the_inputs_take_any_compressor():
    rules = [
        ActivationRule(op="linear", compressor={"name": "host", "inner": {"name": "group"}}),
        ActivationRule(module="h.0.*", op="gelu", compressor="keep"),
        *LOSSY,
    ]
    exact = gradients(GPT())
    for inputs in ({"name": "group", "bits": 8}, {"name": "float", "format": "bf16"}):
        host = {"name": "host", "inner": inputs}
        found = [gradients(wrapped(rules=rules, inputs=each)) for each in (inputs, host)]
        assert same(*found)  # the same codes, wherever they lie
        assert 0.98 < cosine(found[0], exact) < 1


def test_weights_of_two_bytes_and_released_gradients():
    model = GPT()
    cfg = config(["@blocks"], weights="bf16+8", gradients="release")
    model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), cfg)
    losses = []
    for _ in range(5):
        torch.manual_seed(5)
        loss = model(TOKENS).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters())
    assert losses[-1] < 0.9 * losses[0]


def test_rounded_tensors_are_held_as_without_running_again():
    found = []
    for recompute in ([], ["h.0", "h.1"]):
        model = GPT()
        cfg = {
            "preset": "precision_only",
            "activations": {
                "rules": [{"compressor": {"name": "group", "bits": 4}}],
                "recompute": recompute,
                "recompute_saves": "rules",
            },
        }
        model, _ = memtrain.wrap(model, torch.optim.SGD(model.parameters()), cfg, batch=TOKENS)
        found.append(gradients(model))
    assert same(*found)


def test_an_unknown_choice_is_told():
    with pytest.raises(ValueError, match=r"recompute_saves='rule'.*rules"):
        Activations(recompute_saves="rule")


def test_a_plan_lists_that_nothing_runs_again():
    assert "recompute_saves=rules: recompute is empty" in str(memtrain.plan_of(wrapped([])))


@pytest.mark.nightly
def test_hugging_faces_layers_with_tied_weights():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    tokens, found = torch.arange(2 * 32).view(2, 32), []
    for recompute in ([], ["@blocks"]):
        torch.manual_seed(0)
        # A cache of keys and values, which layers that run again have none of, would copy them.
        made = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        model = wrapped(recompute, model=transformers.GPT2LMHeadModel(made).train())
        torch.manual_seed(5)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)
