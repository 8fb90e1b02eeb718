"""bfloat16 products made in float32, on CPUs where that is faster."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PIECE = 512
"""Rows or columns of a product that are in float32 at once: 22 MiB of the widest operand of a
Llama-7B's layers."""

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

Kernel = Callable[..., Any]


def bfloat16_products_are_slow(device: torch.device) -> bool:
    """Whether bfloat16 products are slower on a device than float32's with their casts.

    They are on x86 without AMX. Without AVX-512 oneDNN has none, and torch 2.13 loops over scalars:
    of 4096 x 4096 weights it computes `grad @ weight` at 0.2 GFLOP/s of a thread, and in float32 at
    52. With AVX-512's bfloat16 instructions oneDNN runs at 76, in float32 at 145: of 512 rows the
    product takes 1.3 times the time of float32's with casts, of 2,048 rows 1.7 times.

    Args:
        device: Where a model trains.

    Example:
        >>> bfloat16_products_are_slow(torch.device("meta"))
        False
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


@contextmanager
def float32_products() -> Iterator[None]:
    """Make bfloat16 matrix products and attention of CPU tensors in float32 meanwhile.

    Operands are cast, and each result is rounded to bfloat16 once. The whole process is concerned.
    Products inside of a graph of torch.compile stay torch's own.

    Memory: 4 bytes an element of a matrix product's smaller operand, and of `PIECE` rows or columns
    of its larger one and of its result; 4 bytes an element of all that attention and batched
    products read and write.

    Example:
        >>> one = torch.ones(2, 3, dtype=torch.bfloat16)
        >>> with float32_products():
        ...     (one @ one.T).dtype
        torch.bfloat16
    """
    forms: dict[str, Callable[[Kernel], Kernel]] = {
        "aten::mm": _product,
        "aten::addmm": _sum_and_product,
        "aten::bmm": _whole,
        "aten::baddbmm": _whole,
        ATTENTION: _attention,
        f"{ATTENTION}_backward": _whole,
    }
    # Before any is registered: each would find the one that replaces it.
    own = {name: form(_kernel(name)) for name, form in forms.items()}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name, function in own.items():
                library.impl(name, function, "CPU", with_keyset=True)
        yield
    finally:
        library._destroy()


def _kernel(name: str) -> Kernel:
    return torch.library.get_kernel(name, "CPU").call_boxed


def _whole(kernel: Kernel) -> Kernel:
    """An op whose tensors are cast as wholes, and all of whose results are rounded."""

    def op(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return kernel(keys, *args, **kwargs)
        out = kernel(keys, *map(_cast, args), **{key: _cast(arg) for key, arg in kwargs.items()})
        if isinstance(out, Tensor):
            return out.bfloat16()
        return tuple(result.bfloat16() for result in out)

    return op


def _attention(kernel: Kernel) -> Kernel:
    def op(keys: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        values = map(_cast, (query, *args))
        out, logsumexp = kernel(keys, *values, **{key: _cast(arg) for key, arg in kwargs.items()})
        return out.to(query.dtype), logsumexp  # float32 of bfloat16 attention too

    return op


def _product(kernel: Kernel) -> Kernel:
    def op(keys: Any, left: Tensor, right: Tensor) -> Tensor:
        if left.dtype != torch.bfloat16:
            return kernel(keys, left, right)
        return _in_pieces(left, right, lambda rows, columns, at: kernel(keys, rows, columns))

    return op


def _sum_and_product(kernel: Kernel) -> Kernel:
    def op(keys: Any, added: Tensor, left: Tensor, right: Tensor, **factors: Any) -> Tensor:
        if left.dtype != torch.bfloat16:
            return kernel(keys, added, left, right, **factors)
        added = added.expand(left.shape[0], right.shape[1])
        return _in_pieces(
            left,
            right,
            lambda rows, columns, at: kernel(keys, added[at].float(), rows, columns, **factors),
        )

    return op


def _in_pieces(left: Tensor, right: Tensor, product: Callable[..., Tensor]) -> Tensor:
    """Multiply matrices with the larger one, or its larger side, in float32 a piece at a time.

    Args:
        left: (n, k) in bfloat16.
        right: (k, m) in bfloat16.
        product: Of float32 rows and columns, and of where they lie in the result.

    Returns:
        (n, m) in bfloat16.
    """
    out = left.new_empty(left.shape[0], right.shape[1])
    by_rows = left.shape[0] > right.shape[1]
    whole = (right if by_rows else left).float()
    for start in range(0, max(out.shape), PIECE):
        piece = slice(start, start + PIECE)
        if by_rows:
            out[piece] = product(left[piece].float(), whole, piece)
        else:
            at = (slice(None), piece)
            out[at] = product(whole, right[at].float(), at)
    return out


def _cast(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value
