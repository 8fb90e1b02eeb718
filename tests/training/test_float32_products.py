"""bfloat16 products made in float32: as exact as one rounding allows, and gone afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain.training.float32_products import (
    PIECE,
    bfloat16_products_are_slow,
    float32_products,
)

HALF_STEP = 2.0**-8  # of bfloat16 at most, relative: its significand has 8 bits


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).bfloat16()


def assert_rounded_once(out: Tensor, exact: Tensor, of_magnitudes: Tensor, terms: int) -> None:
    """Compare with a float64 result.

    Args:
        out: In bfloat16.
        exact: The same in float64.
        of_magnitudes: The result of the operands' absolute values.
        terms: Summed for an element: each adds at most a float32 rounding of what is summed.
    """
    allowed = HALF_STEP * exact.abs() + 2 * terms * 2.0**-24 * of_magnitudes
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(3, 5, 2 * PIECE + 1), (PIECE + 7, 16, 9), (1, 1, 1), (0, 4, 3), (4, 0, 3), (2, 3, 0)],
)
def test_products_are_rounded_once(rows: int, inner: int, columns: int) -> None:
    left, right, added = drawn(rows, inner), drawn(columns, inner).T, drawn(columns)
    with float32_products():
        product, linear = left @ right, F.linear(left, right.T, added)
        scaled = torch.addmm(added, left, right, beta=0.5, alpha=2)
    exact, magnitudes = left.double() @ right.double(), left.abs().double() @ right.abs().double()
    assert_rounded_once(product, exact, magnitudes, inner)
    bias = added.double()
    assert_rounded_once(linear, exact + bias, magnitudes + bias.abs(), inner + 1)
    assert_rounded_once(scaled, 2 * exact + bias / 2, 2 * magnitudes + bias.abs() / 2, inner + 1)


def test_batched_products_are_rounded_once() -> None:
    left, right, added = drawn(3, 4, 5), drawn(3, 5, 6), drawn(3, 4, 6)
    with float32_products():
        out, more = torch.bmm(left, right), torch.baddbmm(added, left, right)
    exact = left.double() @ right.double()
    magnitudes = left.abs().double() @ right.abs().double()
    assert_rounded_once(out, exact, magnitudes, 5)
    assert_rounded_once(more, exact + added.double(), magnitudes + added.abs().double(), 6)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_are_float32s_rounded_once(masked: bool) -> None:
    query, key, value = (drawn(2, 3, 9, 8).requires_grad_() for _ in range(3))
    mask = drawn(9, 9) if masked else None
    grad = drawn(2, 3, 9, 8)
    with float32_products():
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked
        )
        out.backward(grad)
    twins = tuple(x.detach().float().requires_grad_() for x in (query, key, value))
    wanted = F.scaled_dot_product_attention(
        *twins, attn_mask=None if mask is None else mask.float(), is_causal=not masked
    )
    assert torch.equal(out, wanted.bfloat16())
    # The backward reads the rounded result, in place of the exact one.
    own = torch.autograd.grad(wanted, twins, grad.float())
    for x, gradient in zip((query, key, value), own, strict=True):
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
        assert (x.grad - gradient).norm() <= 2 * HALF_STEP * gradient.norm()


def test_other_dtypes_and_later_products_are_torchs() -> None:
    single, half = torch.randn(7, 7), drawn(33, 600)
    plain, own = single @ single, half @ half.T
    with float32_products():
        assert torch.equal(single @ single, plain)
        query = torch.randn(1, 1, 4, 4)
        F.scaled_dot_product_attention(query, query, query)
    assert torch.equal(half @ half.T, own)


@pytest.mark.parametrize(
    ("mkldnn", "avx512", "amx", "slow"),
    [(False, False, False, True), (True, True, False, True), (True, True, True, False)],
)
def test_only_amx_is_faster_with_bfloat16_products(
    monkeypatch: pytest.MonkeyPatch, mkldnn: bool, avx512: bool, amx: bool, slow: bool
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert bfloat16_products_are_slow(torch.device("cpu")) is slow
