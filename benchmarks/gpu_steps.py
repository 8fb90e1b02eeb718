"""What a first session on a GPU measures: the cases of `gpu_session.STEPS`, step by step.

A case is the labels of a row and a function that finds the rest of it. A case is made when the one
before has run.
"""

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memtrain
from benchmarks import activations
from benchmarks.gpu_clocks import Row, Scale, clocks, guarded, waits
from benchmarks.gpu_session import ROOT, emit, this
from benchmarks.harness import Options
from benchmarks.optimizer import OURS, PEERS, gpt2_small, make_params, peer
from memtrain import optim
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.predict import predict
from memtrain.precision import FORMATS

TINY_TESTS = "tests/kernels/test_pack.py::test_a_mask_takes_every_nonzero_byte_as_true"
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")

Case = tuple[Row, Callable[[], Row]]


def environment(scale: Scale) -> Iterator[Case]:
    """Versions, the device, and its two ceilings: a copy's bandwidth, a matrix product's rate."""
    yield {}, memtrain.collect_env
    if scale.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        sizes = {"free_nbytes": free, "total_nbytes": total}
        yield {"properties": str(found)}, lambda: sizes
    n = 1 << (10 if scale.tiny else 28)
    x = torch.ones(n, dtype=torch.float32, device=scale.device)
    pinned = torch.empty(n // 8, pin_memory=scale.device == "cuda")
    copies = {
        "device to device": (torch.empty_like(x), x, 2 * x.nbytes),
        "to host": (pinned, x[: n // 8], pinned.nbytes),
        "from host": (x[: n // 8], pinned, pinned.nbytes),
    }

    def copied(target: Any, source: Any, nbytes: int) -> Row:
        found = clocks(lambda: target.copy_(source, non_blocking=True), scale)
        return found | {"gb_per_s": nbytes / found["wall_ms"] / 1e6}

    for direction, copy in copies.items():
        yield {"copy": direction, "nbytes": copy[1].nbytes}, partial(copied, *copy)
    size = 32 if scale.tiny else 8192
    a = torch.randn(size, size, device=scale.device, dtype=torch.bfloat16)

    def product() -> Row:
        found = clocks(lambda: a @ a, scale)
        return found | {"tflops": 2 * size**3 / found["wall_ms"] / 1e9}

    yield {"product": f"bfloat16 {size}"}, product


def driver(scale: Scale) -> Iterator[Case]:
    """Every kernel once or a few times, at odd sizes: does it launch at all?"""
    opcheck = import_module("tests.kernels.test_opcheck")

    def called(name: str) -> Row:
        op = getattr(torch.ops.memtrain, name).default
        with torch.device(scale.device):
            cases = opcheck.CASES[name]()[: 1 if scale.tiny else None]
            for arguments in cases:
                op(*arguments)
        scale.sync()
        return {"calls": len(cases)}

    for name in opcheck.NAMES:
        yield {"op": name}, partial(called, name)
    for name, make in optimizers().items():
        yield {"step of": name}, partial(stepped, make, scale)


# Of parameters; all but the last large enough for their states to be quantised.
SHAPES = ((200, 77), (3, 50, 77), (5003,), (1, 4129), (301,))


def stepped(make: Callable[..., Any], scale: Scale) -> Row:
    """Two steps of an optimizer; the second reads states that the first made."""
    params = make_params(SHAPES, scale.device)
    optimizer = make(params)
    for _ in range(2):
        optimizer.step()
    scale.sync()
    each = optim.state_bytes(optimizer) / sum(p.numel() for p in params)
    finite = all(bool(p.isfinite().all()) for p in params)
    return {"finite": finite, "state_bytes_per_parameter": each}


def kernel_tests(scale: Scale) -> Iterator[Case]:
    """Every Triton case of tests/kernels, on CUDA tensors, and tests/test_gpu.py."""
    yield {}, partial(tested, scale)


def tested(scale: Scale) -> Row:
    """Counts of the tests; what failed is in rows of its own."""
    import pytest

    counts: Counter[str] = Counter()
    write = partial(emit, "kernel_tests", scale.out)  # as they come: there may be no end

    class Recorded:
        """Writes what failed, and counts."""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                write({"failed": report.nodeid, "message": str(report.longrepr)[-1500:]})
            if report.when == "call" or report.failed or report.skipped:
                counts[report.outcome] += 1
                if sum(counts.values()) % 50 == 0:
                    write({"so far": dict(counts)})

    paths = ["tests/kernels", "tests/test_gpu.py"] if scale.device == "cuda" else [TINY_TESTS]
    # An unknown warning of another torch is no failure here.
    arguments = ["-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    arguments += ["-m", "gpu"] if scale.device == "cuda" else ["-k", "triton"]
    if find_spec("xdist"):
        # A worker for each core, up to the contexts that fit on the device: kernels compile first.
        arguments += ["-n", str(min(12, os.cpu_count() or 1)) if scale.device == "cuda" else "0"]
    os.chdir(ROOT)
    status = pytest.main([*arguments, *paths], plugins=[Recorded()])
    if not counts["passed"]:
        raise RuntimeError(f"no test passed: pytest ended with {int(status)}")
    return {"status": int(status), **counts}


def sanitizer(scale: Scale) -> Iterator[Case]:
    """`driver` under compute-sanitizer, where there is one."""
    tool = shutil.which("compute-sanitizer") or next(filter(os.path.exists, SANITIZERS), None)
    if tool is None:
        yield {"skipped": "compute-sanitizer is not here"}, dict
        return
    # Each tensor in an allocation of its own: a kernel that runs over one's end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    processes = 8

    def checked(kind: str, first: int) -> Row:
        command = [tool, "--tool", kind, *this("driver", Path(os.devnull), first, processes)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        lines = (ended.stdout + ended.stderr).splitlines()
        found = [line for line in lines if line.startswith("=========")]
        return {"rc": ended.returncode, "summary": found[-1:], "first": found[:30]}

    with ThreadPoolExecutor(processes) as pool:
        for kind in ("memcheck", "racecheck"):
            waiting = [pool.submit(checked, kind, first) for first in range(processes)]
            for first, one in enumerate(waiting):
                yield {"tool": kind, "process": first}, one.result


def bandwidth(scale: Scale) -> Iterator[Case]:
    """Each kernel of saved activations at 2^26 elements, against a copy and torch's own op."""
    sizes = ("powers=10", "ops=gelu:3,group:4") if scale.tiny else ("powers=26",)
    options = Options(
        scale.device, quick=scale.tiny, rounds=2 if scale.tiny else 5, overrides=sizes
    )
    for job in activations.jobs(options):
        yield {"kernel": job.title}, lambda job=job: dict(job.run()[0])
    x = torch.randn(1 << (10 if scale.tiny else 26), device=scale.device)
    for name in ("fp8_forward", "e4m3fn", "bf16"):
        yield {"rounding": name}, partial(clocks, partial(FORMATS[name].round_count, x), scale)
    for name in LAYERS:
        for side in ("memtrain", "torch"):
            yield {"layer": name, "side": side}, partial(layer, name, side, scale)


LAYERS = ("layer norm", "rms norm", "batch norm", "max pool", "cross-entropy")


def layer(name: str, side: str, scale: Scale) -> Row:
    """Clocks of a layer's forward and backward in bfloat16."""

    class Loss(nn.Module):
        def forward(self, x):
            return nn.functional.cross_entropy(x, torch.zeros_like(x[:, 0]).long())

    rows, maps = (4, (2, 8, 8, 8)) if scale.tiny else (1 << 16, (64, 256, 64, 64))
    module, shape = {
        "layer norm": lambda: (nn.LayerNorm(1024), (rows, 1024)),
        "rms norm": lambda: (nn.RMSNorm(1024), (rows, 1024)),
        "batch norm": lambda: (nn.BatchNorm2d(maps[1]), maps),
        "max pool": lambda: (nn.MaxPool2d(2), maps),
        "cross-entropy": lambda: (Loss(), (8, 300) if scale.tiny else (8192, 50257)),
    }[name]()
    model = nn.Sequential(nn.Identity(), module).to(scale.device, torch.bfloat16)
    model.register_parameter("unused", nn.Parameter(torch.ones(1)))  # pooling has none
    if side == "memtrain":
        preset = ["preset=activations_only", "activations.min_elements=1"]
        memtrain.wrap(model, torch.optim.SGD(model.parameters()), preset)
    x = torch.randn(shape, device=scale.device, dtype=torch.bfloat16).requires_grad_()

    def both() -> None:
        y = model(x)
        y.backward(torch.ones_like(y))

    return clocks(both, scale, 5)


def optimizers() -> dict[str, Callable[..., Any]]:
    """Each form of state of the fused optimizers."""
    exact = partial(optim.AdamW4bit, min_elements=1 << 40)

    def split(weights: str, params: Any) -> Any:
        return optim.SplitWeights(optim.AdamW4bit(params), weights)

    others = {"exact": exact}
    others |= {weights: partial(split, weights) for weights in ("bf16+8", "bf16+sr")}
    return {name: make for name, (make, _) in OURS.items()} | others


def optimizer(scale: Scale) -> Iterator[Case]:
    """A step over GPT-2-small's parameters: wall, host and kernels."""
    shapes = [(8, 65), (65,)] if scale.tiny else gpt2_small()
    ours = {
        "AdamW4bit, rank-1": optim.AdamW4bit,
        "AdamW4bit, B128 both": partial(optim.AdamW4bit, second="B128/Linear"),
        "AdamW4bitFactor": optim.AdamW4bitFactor,
        "AdamW8bit": optim.AdamW8bit,
        "exact": partial(optim.AdamW4bit, min_elements=1 << 40),
        "torch fused": partial(torch.optim.AdamW, fused=True),
    }

    def measured(make: Any, dtype: str) -> Row:
        params = make_params(shapes, scale.device)
        for p in params:
            p.data, p.grad = p.data.to(getattr(torch, dtype)), None
            p.grad = torch.full_like(p, 1e-3)
        found = clocks(make(params).step, scale)
        return found | {"parameters": sum(p.numel() for p in params), "tensors": len(params)}

    for name, make in list(ours.items())[-2 if scale.tiny else 0 :]:
        for dtype in ("float32", "bfloat16")[: 1 if scale.tiny else 2]:
            yield {"optimizer": name, "dtype": dtype}, partial(measured, make, dtype)
    params = make_params(shapes, scale.device)

    def theirs(name: str) -> Row:
        found = peer(name, params)
        return {"skipped": found} if isinstance(found, str) else clocks(found.step, scale)

    for name in PEERS:
        yield {"optimizer": name}, partial(theirs, name)


VARIANTS = ("plain", "exact", "balanced", "checkpointed", "torch checkpointing")


def training(family: str, scale: Scale, *, compiled: bool) -> Iterator[Case]:
    """A training step of a language model: time, launches, and the peak beside its prediction."""
    cases = [(variant, "default") for variant in VARIANTS]
    if compiled:  # where the partitioner itself chooses what is computed again
        modes = ("default", "reduce-overhead")  # what says most comes first
        cases = [(variant, mode) for mode in modes for variant in ("plain", "balanced")]
        cases += [(variant, "default") for variant in ("exact", "checkpointed")]
    for variant, mode in cases:
        label = {"model": family, "variant": variant, "compiled": compiled, "mode": mode}
        how = mode if compiled else None
        yield label, partial(trained, family, variant, scale, mode=how)


def trained(family: str, variant: str, scale: Scale, *, mode: str | None) -> Row:
    """One row of `training`, compiled where there is a mode."""
    torch.manual_seed(0)
    model, batch = language_model(family, scale)
    if variant == "torch checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    preset = None if variant in ("plain", "torch checkpointing") else variant
    found = {} if mode or scale.tiny else predicted(model, optimizer, batch, preset)
    if preset is not None:
        model, optimizer = memtrain.wrap(model, optimizer, preset)
    # In a tiny run the compiler's front alone: what it makes for a CPU is no matter here.
    how: dict[str, Any] = {"backend": "aot_eager"} if scale.tiny else {"mode": mode}
    run = torch.compile(model, **how) if mode else model
    parts = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    losses: list[Any] = []

    def step() -> None:
        then = time.perf_counter()
        with torch.autocast(scale.device, torch.bfloat16):
            loss = run(**batch).loss
        for part, call in (
            ("forward", lambda: losses.append(loss.detach().clone())),
            ("backward", loss.backward),
            ("step", optimizer.step),
        ):
            call()
            then, parts[part] = time.perf_counter(), 1e3 * (time.perf_counter() - then)
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    step()
    scale.sync()
    found["first_step_s"] = time.perf_counter() - start
    step()
    if scale.device == "cuda":
        scale.sync()
        torch.cuda.reset_peak_memory_stats()
        step()
        scale.sync()
        found["peak_nbytes"] = torch.cuda.max_memory_allocated()
        if "predicted_nbytes" in found:
            found["predicted_over_peak"] = found["predicted_nbytes"] / found["peak_nbytes"]
    found |= clocks(step, scale, rounds=5)
    found |= {f"host_{name}_ms": value for name, value in parts.items()}
    if preset is not None and mode:  # a replay that skips the host would not count
        found["counted"] = memtrain.state_dict(model)["step"]
    return found | {"losses": [float(loss) for loss in losses]}


def predicted(model: Any, optimizer: Any, batch: Any, preset: str | None) -> Row:
    """The predicted peak of a step, or why there is none."""

    def make() -> Row:
        options = StepOptions(autocast=torch.bfloat16)
        peak = predict(model, optimizer, batch, preset, options).peak
        return {"predicted_nbytes": peak.nbytes, "predicted_at": peak.label}

    return guarded({}, make)


def language_model(family: str, scale: Scale) -> tuple[Any, dict[str, Any]]:
    """GPT-2-small (batch 8 x 1024) or a Llama of 1.2 billion (4 x 1024), and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if family == "gpt2":
        tiny = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        tiny |= {"bos_token_id": None, "eos_token_id": None}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        config, shape = GPT2Config(**still, **(tiny if scale.tiny else {})), (8, 1024)
        make: Any = GPT2LMHeadModel
    else:
        tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        tiny |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
        large = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        large |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        config = LlamaConfig(**(tiny if scale.tiny else large), use_cache=False)
        shape, make = (4, 1024), LlamaForCausalLM
    with torch.device(scale.device):
        model = make(config)
        x = torch.randint(config.vocab_size, (1, 16) if scale.tiny else shape)
    return model.train(), {"input_ids": x, "labels": x}


def synchronisations(scale: Scale) -> Iterator[Case]:
    """Where a warmed-up training step waits for the device, by torch.cuda.set_sync_debug_mode."""

    def found(preset: str, extra: Sequence[str]) -> Row:
        model, batch = language_model("gpt2", scale)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        if preset != "plain":
            model, optimizer = memtrain.wrap(model, optimizer, [f"preset={preset}", *extra])

        def step() -> None:
            with torch.autocast(scale.device, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(1 if scale.tiny else 3):
            step()
        return waits(step, scale)

    others = ("exact", "checkpointed", "smallest", "fewbit3", "actnn_l3", "gact4")
    for preset in ("plain", "balanced", *(() if scale.tiny else others)):
        for extra in ([], ["gradients=release"])[: 2 if preset == "balanced" else 1]:
            yield {"preset": preset, "extra": extra}, partial(found, preset, extra)


CASES: dict[str, Callable[[Scale], Iterator[Case]]] = {
    "environment": environment,
    "driver": driver,
    "kernel_tests": kernel_tests,
    "optimizer": optimizer,
    "gpt2": partial(training, "gpt2", compiled=False),
    "synchronisations": synchronisations,
    "bandwidth": bandwidth,
    "llama": partial(training, "llama", compiled=False),
    "gpt2_compiled": partial(training, "gpt2", compiled=True),
    "llama_compiled": partial(training, "llama", compiled=True),
    "sanitizer": sanitizer,
}
"""Step -> its cases."""
