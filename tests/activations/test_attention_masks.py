"""What attention saves that no group of a few bits holds: masks of -inf, and its log-sum-exp."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function

from memtrain import plan_of, wrap
from memtrain.activations.intercept import op_mode

BATCH, TOKENS, HEADS, WIDTH = 4, 32, 4, 16
MASKED = {"inf": float("-inf"), "lowest": torch.finfo(torch.float32).min}
# to float32, which changes nothing: but what is saved waits until its op has run
ROUNDED = {
    "preset": "activations_only",
    "precision": {"assignment": "size_ordered", "ratio": 0.0, "high": "fp32"},
}


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.heads = HEADS * width
        self.qkv = nn.Linear(64, 3 * self.heads)
        self.out = nn.Linear(self.heads, 64)

    def forward(self, x, mask):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def mask_of(kind, heads=1):
    """Causal, and without the last tokens; as bools, or as numbers that are added."""
    keep = torch.ones(BATCH, heads, TOKENS, TOKENS, dtype=torch.bool).tril()
    keep[..., 20:] = False
    return keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, MASKED[kind])


class Masked(nn.Module):
    """Makes its mask itself: one that is given is the model's own input, which stays alive."""

    def __init__(self, kind, heads=1, width=WIDTH):
        super().__init__()
        self.attention, self.kind, self.count = Attention(width), kind, heads

    def forward(self, x):
        return self.attention(x, mask_of(self.kind, self.count))


@pytest.mark.parametrize(
    ("kind", "heads", "width", "nbytes"),
    [
        ("bool", 1, WIDTH, BATCH * TOKENS * TOKENS // 8 + 4),
        ("bool", HEADS, TOKENS, BATCH * HEADS * TOKENS * TOKENS // 8 + 4),
        ("inf", 1, WIDTH, 4 * BATCH * TOKENS * TOKENS),
        ("lowest", 1, WIDTH, 4 * BATCH * TOKENS * TOKENS),
    ],
    ids=["bool", "bool-like-result", "inf", "lowest"],
)
def test_gradients_of_a_masked_attention_are_those_without_a_mask_of_few_bits(
    kind, heads, width, nbytes
):
    model = Masked(kind, heads, width)
    x = torch.randn(BATCH, TOKENS, 64)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model, _ = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), "activations_only")
    model(x).square().sum().backward()
    for p, grad in zip(model.parameters(), plain, strict=True):
        # 4-bit groups of normal numbers: a step is 1/15 of about 5 deviations, rounding at random
        # errs by at most half a step on average, 0.17; a mask that is lost gives NaN
        assert (p.grad - grad).norm() < 0.2 * grad.norm()
    sites = {entry.site: entry for entry in plan_of(model).entries("activation")}
    site = next(x for x in sites if x.endswith("scaled_dot_product_attention / input3"))
    assert sites[site].planned == nbytes
    assert sites[site].compressor == ("Integers(limit=2)" if kind == "bool" else "")


class WrittenOut(nn.Module):
    """Attention that the CPU writes out: its probabilities are saved, and what dropout drew."""

    def __init__(self, dims, dropout):
        super().__init__()
        self.qkv, self.dims, self.dropout = nn.Linear(64, 3 * 64), dims, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.dims == 4:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        mask = torch.ones(*q.shape[:-1], TOKENS, dtype=torch.bool).tril()
        if self.dims == 3:
            mask = mask[0]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return F.gelu(y)  # which is replaced, so that the module's ops are watched


@pytest.mark.parametrize("cfg", ["activations_only", ROUNDED], ids=["plain", "rounded"])
@pytest.mark.parametrize(("dims", "dropout"), [(4, 0.1), (3, 0.0), (3, 0.1)])
def test_what_is_no_mask_is_not_taken_for_one(dims, dropout, cfg):
    model, x = WrittenOut(dims, dropout), torch.randn(BATCH, TOKENS, 64)
    grads = []
    for preset in (None, cfg):
        torch.manual_seed(0)
        grads.append(trained(model, x, preset)[0])
    assert (grads[1] - grads[0]).norm() < 0.2 * grads[0].norm()  # as above


class Cuda:
    """Stands in on the CPU for CUDA's attention: the memory-efficient, but for its bias's form."""

    def __init__(self):
        self.__name__ = "scaled_dot_product_attention"
        self.cudnn = False
        """Whether the bias is cuDNN's."""
        self.biases = []
        """What the backward was given."""

    def bias(self, mask, query, key):
        """As torch's attention.cpp makes it."""
        if mask.dtype == torch.bool:
            low = -65504.0 if self.cudnn else -math.inf
            zero = torch.scalar_tensor(0.0, dtype=query.dtype)
            mask = torch.where(mask.logical_not(), low, zero)
        if self.cudnn:
            return mask
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        return mask.expand(*query.shape[:-1], key.shape[-2])

    def __call__(self, query, key, value, attn_mask=None):
        given = query, key, value
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(self, given, *given, attn_mask=attn_mask)
        bias = None if attn_mask is None else self.bias(attn_mask, query, key)
        return torch.ops.aten._scaled_dot_product_efficient_attention(*given, bias, True)[0]

    def forward(self, q, k, v, bias, lse, dropout_p=0.0, is_causal=False, *, scale=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)
        sums = scores.logsumexp(-1)
        out = ((scores - sums[..., None]).exp() @ v).transpose(1, 2).contiguous().transpose(1, 2)
        padded = F.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
        return out, padded, torch.zeros(()).long(), torch.zeros(()).long()

    def backward(self, grad, q, k, v, bias, out, sums, *others, scale=None):
        self.biases.append(bias)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + (0 if bias is None else bias)
        p = (scores - sums[..., : q.shape[2], None]).exp()
        ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        learned = ds * math.sqrt(q.shape[-1]) if others[3][3] else None
        return ds @ k, ds.mT @ q, p.mT @ grad, learned


@pytest.fixture
def cuda(monkeypatch):
    kernel, name = Cuda(), "_scaled_dot_product_efficient_attention"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, kernel.forward, "CPU")
        library.impl(f"{name}_backward", kernel.backward, "CPU")
        monkeypatch.setattr(F, kernel.__name__, kernel)
        monkeypatch.setattr(op_mode, "_ATTENTIONS", frozenset((kernel,)))
        yield kernel


def trained(model, x, preset=None):
    """Gradients of a step, and the plan's entries for the attention."""
    model.zero_grad()
    if preset is not None:
        model, _ = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), preset)
    model(x).square().sum().backward()
    entries = [] if preset is None else plan_of(model).entries("activation")
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    return grads, [entry for entry in entries if "dot_product_attention" in entry.site]


class Exposed(nn.Module):
    """Attention whose query, key and value the test sees."""

    def __init__(self, scale, options):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, HEADS * WIDTH) for _ in range(3))
        self.scale, self.options = scale, options

    def forward(self, x):
        heads = [f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in self.layers]
        self.heads = [heads[0] * self.scale, heads[1] * 1, heads[2] * 1]
        return F.scaled_dot_product_attention(*self.heads, **self.options)


@pytest.mark.parametrize("scale", [1, 1e2, 1e4])
@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        *(("flash", mask) for mask in ("none", "causal", "bool", *MASKED)),
        *(("efficient", mask) for mask in ("none", "bool", *MASKED)),
    ],
)
def test_attention_has_the_exact_gradient_at_what_is_decompressed(kernel, scale, mask, request):
    if kernel == "efficient":
        request.getfixturevalue("cuda")
    options = {} if mask in ("none", "causal") else {"attn_mask": mask_of(mask)}
    model = Exposed(scale, {"is_causal": True} if mask == "causal" else options)
    wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), "activations_only")
    y = model(torch.randn(BATCH, TOKENS, 32))
    node, dy = y.grad_fn, torch.randn(y.shape)
    grads = torch.autograd.grad(y, model.heads, dy, retain_graph=True)
    decoded = [x.detach() for x in (node._saved_query, node._saved_key, node._saved_value)]
    assert not any(torch.equal(a, b) for a, b in zip(decoded, model.heads, strict=True))
    twice = [x.double().requires_grad_() for x in decoded]
    bias = options.get("attn_mask")
    if mask == "causal":
        bias = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    elif bias is not None and mask != "bool":
        bias = bias.double()
    exact = F.scaled_dot_product_attention(*twice, attn_mask=bias)
    q, k, v = decoded
    scores = float((q @ k.mT).abs().max()) / math.sqrt(WIDTH)
    eps = torch.finfo(torch.float32).eps
    terms = dy.norm() * v.norm() * (1 + q.norm() + k.norm())
    for a, b in zip(grads, torch.autograd.grad(exact, twice, dy.double()), strict=True):
        assert (a - b).norm() <= eps * (8 + 4 * scores) * terms
    sums = [e.planned for e in plan_of(model).entries("activation") if "sumexp" in e.site]
    assert sums == [0]


class Padding(nn.Module):
    """Masks the last keys of samples, for each query anew or for all of them at once."""

    def __init__(self, kind, rows):
        super().__init__()
        self.attention, self.kind, self.rows, self.short = Attention(), kind, rows, 5

    def forward(self, x):
        tokens = x.shape[1]
        keep = torch.arange(tokens) < tokens - self.short * torch.arange(BATCH).view(-1, 1, 1, 1)
        keep = keep.expand(-1, -1, tokens if self.rows else 1, -1).contiguous()
        if self.kind == "bool":
            return self.attention(x, keep)
        return self.attention(x, torch.zeros(keep.shape).masked_fill(~keep, MASKED[self.kind]))


@pytest.mark.parametrize("kind", ["bool", *MASKED])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "keys"])
@pytest.mark.parametrize("tokens", [32, 36])  # a row that is aligned, and one that torch pads
def test_the_memory_efficient_backward_is_given_its_bias(cuda, tokens, rows, kind):
    compare(cuda, Padding(kind, rows), torch.randn(BATCH, tokens, 64), kind)


@pytest.mark.parametrize("short", [5, 0], ids=["padding", "none"])
@pytest.mark.parametrize("kind", ["bool", *MASKED])
def test_cudnns_backward_is_given_its_bias(cuda, kind, short):
    cuda.cudnn, model = True, Padding(kind, rows=True)
    model.short = short
    compare(cuda, model, torch.randn(BATCH, 36, 64), kind)


class Learned(nn.Module):
    """Adds a bias that is learned to the scores that are not hidden."""

    def __init__(self):
        super().__init__()
        self.attention, self.bias = Attention(), nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def forward(self, x):
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        return self.attention(x, self.bias.masked_fill(later, -math.inf)[None])


def test_a_learned_bias_of_inf_is_kept(cuda):
    compare(cuda, Learned(), torch.randn(BATCH, TOKENS, 64), "learned")


class Frozen(nn.Module):
    """Of a query, a key and a value not all have a gradient: so is the first layer under LoRA."""

    def __init__(self, trained, tokens):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkv"})
        for name in "qkv":
            self.parts[name].requires_grad_(name in trained)
        self.hidden = torch.ones(BATCH, HEADS, tokens, tokens, dtype=torch.bool).tril()

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts.values()
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.hidden & True)


@pytest.mark.parametrize(
    ("parts", "tokens"), [("qv", TOKENS), ("kv", TOKENS), ("v", TOKENS), ("qv", WIDTH)]
)
def test_a_mask_takes_one_bit_beside_what_has_no_gradient(parts, tokens):
    model, x = Frozen(parts, tokens), torch.randn(BATCH, tokens, 64)
    plain, _ = trained(model, x)
    grads, entries = trained(model, x, "activations_only")
    assert (grads - plain).norm() < 0.2 * plain.norm()  # as above
    (entry,) = [entry for entry in entries if entry.site.endswith(" / input3")]
    assert entry.compressor == "Integers(limit=2)"


def compare(cuda, model, x, kind):
    plain, _ = trained(model, x)
    grads, entries = trained(model, x, "activations_only")
    then, now = cuda.biases
    assert torch.equal(now, then)
    assert now.stride() == then.stride()
    assert now.untyped_storage().nbytes() == then.untyped_storage().nbytes()  # rows' ends are read
    assert (grads - plain).norm() < 0.2 * plain.norm()  # as above
    if kind == "bool":
        assert "Integers(limit=2)" in {entry.compressor for entry in entries}


@pytest.mark.parametrize("kept", ["input|input1", "input|input1|input2", "input|input1|saved"])
def test_exact_queries_and_keys_have_a_result_that_fits_their_values(kept):
    def gradient(model):
        loss = model(x, None).square().sum()
        return torch.autograd.grad(loss, model.qkv.weight)[0][: 2 * model.heads].flatten()

    torch.manual_seed(0)
    x, model = 10 * torch.randn(BATCH, TOKENS, 64), Attention()  # scores that saturate
    exact, rule = gradient(model), f"{{op: '*attention', tensor: {kept}, compressor: keep}}"
    model, _ = wrap(model, None, ["preset=activations_only", f"activations.exceptions=[{rule}]"])
    assert torch.cosine_similarity(gradient(model), exact, 0) > 0.99
