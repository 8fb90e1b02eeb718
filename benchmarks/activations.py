"""Saved activations in few bits: each op against torch's own, over sizes.

`--set powers=10,14,28` chooses the sizes (powers of 2), `--set ops=gelu:3,relu,group:4` the ops and
the bits of those that have a choice.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Benchmark, Job, Options, Trial, require, timed
from memtrain.activations.ops.dropout import dropout
from memtrain.activations.ops.fewbit import fewbit
from memtrain.audit.live_storages import saved_nbytes
from memtrain.compressors import COMPRESSORS, Compressor, DerivativeCode, Key
from memtrain.kernels.dispatch import backend

DTYPES = (torch.float32, torch.bfloat16)
FUNCTIONS = (*((name, bits) for name in ("gelu", "silu") for bits in (1, 2, 3, 4)), ("relu", 1))
PAIRS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("group", 2, {"bits": 2}),
    ("group", 4, {"bits": 4}),
    ("patch", 2, {}),
    ("derivative", 3, {"bits": 3, "function": "gelu"}),
)
TORCH = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
GATED = 1 << 16  # elements that a gate compares with the reference, which is slow
REFERENCE = 1 << 18  # the largest size at which the reference itself is timed
MAP = 1024  # elements of a feature map of the patches: 32 x 32


def sizes(options: Options) -> list[int]:
    """Numbers of elements: 2^10 to 2^24 by fours, to 2^28 in full."""
    if powers := settings(options)["powers"]:
        return [1 << int(power) for power in powers]
    largest = 13 if options.quick else 29 if options.full else 25
    return [1 << power for power in range(10, largest, 2)]


def settings(options: Options) -> dict[str, list[str]]:
    """The chosen ops and powers of two; an empty list of them is all."""
    chosen = options.settings(ops="", powers="")
    return {key: value.split(",") if value else [] for key, value in chosen.items()}


def _wanted(options: Options, op: str, bits: int) -> bool:
    ops = settings(options)["ops"]
    return not ops or op in ops or f"{op}:{bits}" in ops


def jobs(options: Options) -> Iterator[Job]:
    wanted = partial(_wanted, options)
    for dtype in DTYPES:
        for n in sizes(options):
            for function, bits in FUNCTIONS:
                if wanted(function, bits):
                    yield nonlinearity(function, bits, n, dtype, options)
            if wanted("dropout", 1):
                yield masked_dropout(n, dtype, options)
            for name, bits, fields in PAIRS:
                if wanted(name, bits):
                    yield from pair(name, fields, n, dtype, options)
    if wanted("integers", 1):
        for n in sizes(options):
            yield from pair("integers", {"limit": 2}, n, torch.bool, options)


def _labels(op: str, baseline: str, bits: int | str, shape: tuple[int, ...], dtype: Any) -> Any:
    name = str(dtype).removeprefix("torch.")
    return {"op": op, "baseline": baseline, "bits": bits, "shape": str(shape), "dtype": name}


def _title(labels: dict[str, Any]) -> str:
    return f"{labels['op']} {labels['bits']} {labels['dtype']} {labels['shape']}"


def _both(f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward."""
    y = f(x)
    return y, torch.autograd.grad(y, x, grad)[0]


def _close(ours: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for a few roundings: each device has its own erf, exp and fused multiply-adds."""
    ours, expected, eps = ours.detach(), expected.detach(), torch.finfo(expected.dtype).eps
    near = torch.allclose(ours, expected, rtol=8 * eps, atol=8 * eps)
    require(near, f"{what} differs by {float((ours - expected).abs().max()):.3g}")


def nonlinearity(function: str, bits: int, n: int, dtype: torch.dtype, options: Options) -> Job:
    """Forward and backward of a few-bit function beside torch's."""
    labels = _labels(f"{function} fwd+bwd", f"torch {function}", bits, (n,), dtype)

    def build() -> Trial:
        x, grad = torch.randn(2, n, device=options.device).to(dtype)
        x.requires_grad_()
        code = DerivativeCode(bits=bits, function=function)

        def ours(t: Tensor) -> Tensor:
            return fewbit(t, code)

        def gate() -> None:
            some, its = x.detach()[:GATED].requires_grad_(), grad[:GATED]
            y, dx = _both(ours, some, its)
            exact, slope = _both(TORCH[function], some, its)
            _close(y, exact, "the value")
            if function == "relu":
                require(torch.equal(dx, slope), "the gradient is not torch's")
            with backend("reference"):
                _close(dx, _both(ours, some, its)[1], "the gradient, from the reference's,")

        return Trial(
            ours=lambda: _both(ours, x, grad),
            theirs=lambda: _both(TORCH[function], x, grad),
            gate=gate,
            elements=n,
            nbytes=4 * x.nbytes + 2 * n * bits // 8,
            copied=x.nbytes,
            labels={"saved_bytes": saved_nbytes(lambda: ours(x))[0]},
        )

    return timed(_title(labels), labels, build, options)


def masked_dropout(n: int, dtype: torch.dtype, options: Options) -> Job:
    """Dropout with a mask of one bit beside torch's."""
    labels = _labels("dropout fwd+bwd", "torch dropout", 1, (n,), dtype)

    def build() -> Trial:
        x, grad = torch.randn(2, n, device=options.device).to(dtype)
        x.requires_grad_()

        def gate() -> None:
            results = []
            for f in (dropout, F.dropout):
                torch.manual_seed(1)
                results.append(_both(lambda t, f=f: f(t, 0.1), x, grad))
            for ours, theirs in zip(*results, strict=True):
                require(torch.equal(ours, theirs), "it is not torch's dropout of the same seed")

        return Trial(
            ours=lambda: _both(lambda t: dropout(t, 0.1), x, grad),
            theirs=lambda: _both(lambda t: F.dropout(t, 0.1), x, grad),
            gate=gate,
            elements=n,
            nbytes=4 * x.nbytes + 2 * n // 8,
            copied=x.nbytes,
            labels={"saved_bytes": saved_nbytes(lambda: dropout(x, 0.1))[0]},
        )

    return timed(_title(labels), labels, build, options)


def pair(
    name: str, fields: dict[str, Any], n: int, dtype: torch.dtype, options: Options
) -> Iterator[Job]:
    """Compress and decompress, each by itself; small sizes beside the pure-torch reference."""
    shape = (n // MAP, 1, 32, 32) if name == "patch" else (n,)
    compressor = COMPRESSORS[name](**fields)
    for direction in ("compress", "decompress"):
        theirs = "reference" if n <= REFERENCE else ""
        bits = fields.get("bits", "")
        labels = _labels(f"{name} {direction}", theirs, bits, shape, dtype)

        def build(direction: str = direction) -> Trial:
            x = torch.randn(shape) if dtype.is_floating_point else torch.rand(shape) < 0.9
            return _one_way(compressor, direction, x.to(options.device, dtype))

        yield timed(_title(labels), labels, build, options)


def _one_way(compressor: Compressor, direction: str, x: Tensor) -> Trial:
    key = Key(seed=1)
    packed = compressor.compress(x, key=key)

    def ours() -> object:
        if direction == "compress":
            return compressor.compress(x, key=key)
        return compressor.decompress(packed)

    def reference() -> object:
        with backend("reference"):
            return ours()

    def gate() -> None:
        some = x if x.dim() > 1 and len(x) <= GATED // MAP else x[: GATED if x.dim() == 1 else 64]
        fast = compressor.compress(some, key=key)
        y = compressor.decompress(fast)
        with backend("reference"):
            slow = compressor.compress(some, key=key)
            for part, tensor in slow.tensors.items():
                require(torch.equal(fast.tensors[part], tensor), f"{part} is not the reference's")
            back = compressor.decompress(slow)
        if y.is_floating_point():
            _close(y, back, "the tensor that comes back")
        else:
            require(torch.equal(y, back), "what comes back is not the reference's")

    return Trial(
        ours=ours,
        theirs=reference if x.numel() <= REFERENCE else None,
        gate=gate,
        elements=x.numel(),
        nbytes=x.nbytes + packed.nbytes,
        copied=x.nbytes,
        labels={"saved_bytes": packed.nbytes},
    )


BENCHMARK = Benchmark(
    "activations",
    "saved activations in few bits: each op against torch's own, by size",
    lambda options: list(jobs(options)),
    ("op", "bits", "dtype", "elements", "ours_ms_p50", "theirs_ms_p50", "ratio_p50",
     "ns_per_element", "percent_of_copy", "saved_bytes", "ours_peak_bytes"),
)  # fmt: skip
