"""Masks of attention: what they leave out is -inf, which no group of a few bits holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memtrain import plan_of, wrap

BATCH, TOKENS, HEADS, WIDTH = 4, 32, 4, 16
MASKED = {"inf": float("-inf"), "lowest": torch.finfo(torch.float32).min}


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.heads = HEADS * width
        self.qkv = nn.Linear(64, 3 * self.heads)
        self.out = nn.Linear(self.heads, 64)

    def forward(self, x, mask):
        q, k, v = (
            part.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, -1))


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
        ("bool", 1, WIDTH, BATCH * TOKENS * TOKENS // 8),
        # of the result's shape: neither can be told from the other, and both are kept
        ("bool", HEADS, TOKENS, 2 * 4 * BATCH * HEADS * TOKENS * TOKENS),
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
    assert sites[site].compressor == ("Mask()" if nbytes == BATCH * TOKENS * TOKENS // 8 else "")
