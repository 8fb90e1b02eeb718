"""Float formats: rounding with its overflow count, encoding and decoding beside torch's casts."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memtrain
from benchmarks.harness import Benchmark, Job, Options, Trial, require, timed
from experiments.cifar import cifar
from memtrain.audit.live_storages import saved_nbytes
from memtrain.kernels.dispatch import backend
from memtrain.precision import FORMATS, FloatFormat

DTYPES = (torch.float32, torch.bfloat16)
# format -> torch's type that is nearest to it; the paper's are not torch's, so the names differ
CASTS = {
    "fp8_forward": torch.float8_e4m3fn,
    "fp8_backward": torch.float8_e5m2,
    "fp16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
}
OWN = ("e4m3fn", "e5m2", "bf16")  # torch's casts must give the same numbers
GATED = 1 << 16


def sizes(options: Options) -> list[int]:
    """Numbers of elements: 2^12 to 2^24 by sixteens, to 2^28 in full."""
    largest = 13 if options.quick else 29 if options.full else 25
    return [1 << power for power in range(12, largest, 4)]


def jobs(options: Options) -> list[Job]:
    return [*_ops(options), step(options)]


def _ops(options: Options) -> Iterator[Job]:
    for name in CASTS:
        for dtype in DTYPES:
            for n in sizes(options):
                for op in ("round", "round beside clone", "round in place", "encode", "decode"):
                    yield one(op, name, n, dtype, options)


def one(op: str, name: str, n: int, dtype: torch.dtype, options: Options) -> Job:
    """One op of one format beside torch's cast to its nearest type (and back, for rounding)."""
    form, cast = FORMATS[name], CASTS[name]
    # A clone pays for fresh memory as rounding does, which the copy that is timed does not.
    other = {"encode": f"to {cast}", "decode": f"from {cast}", "round beside clone": "clone"}
    baseline = other.get(op, f"to {cast} and back")
    baseline = baseline.replace("torch.", "")
    labels = _labels(op, baseline, name, str((n,)), dtype)

    def build() -> Trial:
        # Within every format's range: torch's casts of what lies past it differ by version.
        x = torch.randn(n, device=options.device).clamp(-28, 28).to(dtype)
        codes, theirs, own = form.encode(x), x.to(cast), x.clone()
        ours: dict[str, Callable[[], Any]] = {
            "round": lambda: form.round_count(x),
            "round beside clone": lambda: form.round_count(x),
            "round in place": lambda: form.round_count_(own),
            "encode": lambda: form.encode_count(x),
            "decode": lambda: form.decode(codes, dtype),
        }
        torchs: dict[str, Callable[[], Any]] = {
            "round": lambda: x.to(cast).to(dtype),
            "round beside clone": x.clone,
            "round in place": lambda: x.to(cast).to(dtype),
            "encode": lambda: x.to(cast),
            "decode": lambda: theirs.to(dtype),
        }
        moved = x.nbytes + (x.nbytes if op.startswith("round") else codes.nbytes)
        return Trial(
            ours[op],
            torchs[op] if cast != dtype or "clone" in op else None,
            lambda: _gate(form, x[:GATED], cast if name in OWN else None),
            elements=n,
            nbytes=moved,
            copied=x.nbytes,
        )

    return timed(" ".join(map(str, labels.values())), labels, build, options)


def _gate(form: FloatFormat, x: Tensor, cast: torch.dtype | None) -> None:
    """Equal to the reference; and to torch's casts, of its own formats."""
    results: list[tuple[Tensor, ...]] = []
    for use in (None, "reference"):
        if use:
            with backend(use):
                results.append(_all(form, x))
        else:
            results.append(_all(form, x))
    for fast, slow in zip(*results, strict=True):
        require(torch.equal(fast, slow), "it is not the reference's")
    if cast:
        require(torch.equal(results[0][0], x.to(cast).to(x.dtype)), "it is not torch's cast")


def _all(form: FloatFormat, x: Tensor) -> tuple[Tensor, ...]:
    y, count = form.round_count(x)
    codes, past = form.encode_count(x)
    return y, count, codes, past, form.decode(codes, x.dtype)


def _labels(op: str, baseline: str, form: str, shape: str, dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"op": op, "baseline": baseline, "format": form, "shape": shape, "dtype": name}


def step(options: Options) -> Job:
    """A training step of the CIFAR ResNet-18 at `size_ordered(0.5)` beside fp32's."""
    batch, width = (4, 0.1) if options.quick else (32, 1.0)
    labels = _labels(
        "resnet18 step", "fp32", "size_ordered 0.5", str((batch, 3, 32, 32)), torch.float32
    )

    def build() -> Trial:
        x = torch.randn(batch, 3, 32, 32, device=options.device)
        targets = torch.randint(0, 10, (batch,), device=options.device)

        def make(precision: dict[str, Any] | None) -> tuple[Callable[[], Tensor], Callable]:
            torch.manual_seed(0)
            model: nn.Module = cifar(channels=3, width=width).to(options.device)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            if precision is not None:
                cfg = {"preset": "precision_only", "precision": precision}
                model, optimizer = memtrain.wrap(model, optimizer, cfg)

            def loss() -> Tensor:
                return F.cross_entropy(model(x), targets)

            def train() -> Tensor:
                value = loss()
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                return value

            return loss, train

        loss, ours = make({"assignment": "size_ordered", "ratio": 0.5})
        plain, theirs = make(None)

        def gate() -> None:
            exact, _ = make({"assignment": "fp32"})
            require(torch.equal(exact(), plain()), "precision=fp32 is not plain")
            near = torch.allclose(loss(), plain(), rtol=0.2)
            require(near, f"the loss is {loss().item():.4g}, plain {plain().item():.4g}")

        saved = {"saved_bytes": saved_nbytes(loss)[0], "plain_saved_bytes": saved_nbytes(plain)[0]}
        return Trial(ours, theirs, gate, len(x), labels={**saved, "width": width})

    return timed("resnet18 step", labels, build, options)


BENCHMARK = Benchmark(
    "precision",
    "float formats: rounding, encoding and decoding against torch's casts; a training step",
    jobs,
    ("op", "format", "dtype", "elements", "ours_ms_p50", "theirs_ms_p50", "ratio_p50",
     "ns_per_element", "percent_of_copy"),
)  # fmt: skip
