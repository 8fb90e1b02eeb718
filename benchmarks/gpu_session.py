"""Ten minutes on a GPU: one file to run, each step with its own limit of time.

    python3 benchmarks/gpu_session.py --bring site           # where packages can be had, if needed
    python3 benchmarks/gpu_session.py --site site --out out  # where the GPU is; nothing to install
    python3 benchmarks/gpu_session.py --tiny                 # all of it on a CPU, at tiny sizes

Each step is a process of its own, killed at its limit; each result is a line of
`<out>/gpu_session.jsonl` as soon as it is there, and what a step prints is in
`<out>/gpu_session.log`. A case that leaves the device faulted, or dies, ends its process; the cases
after it run in another. docs/gpu.md says what the lines should say. `--steps` takes some of the
steps, in the order given. `--tiny` runs every Triton kernel in the interpreter.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Pure Python that memtrain needs and a machine with torch may lack.
PACKAGES = (
    *("hydra-core>=1.3.2,<1.4", "omegaconf>=2.3,<2.4", "antlr4-python3-runtime==4.9.3"),
    *("rich>=13", "markdown-it-py>=2.2", "mdurl>=0.1", "pygments>=2.13"),
)
TINY_TESTS = "tests/kernels/test_mask.py"
SANITIZERS = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")

FAULTED = 75  # exit status of a step's process whose device has faulted

Row = dict[str, Any]
Case = tuple[Row, Callable[[], Row]]
"""Labels of a row, and a function that finds the rest of it."""


class Scale(NamedTuple):
    """Where a step runs, how much of it, and the file of its rows."""

    device: str
    tiny: bool
    out: Path

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def clear(self) -> None:
        """Hand memory back.

        Raises:
            RuntimeError: If a kernel has faulted: no other runs in this process.
        """
        gc.collect()
        self.sync()
        if self.device == "cuda":
            import torch

            torch.compiler.reset()
            torch.cuda.empty_cache()


class Step(NamedTuple):
    """A step.

    Args:
        limit: Seconds that it may take.
        cases: Its cases, each made when the one before has run.
        side_by_side: Whether each has a process of its own, as many at once as there are cores: a
            kernel's first launch compiles it, on one core, for all steps after this one.
    """

    limit: int
    cases: Callable[[Scale], Iterator[Case]]
    side_by_side: bool = False


# -- Clocks --------------------------------------------------------------------------------------


def clocks(call: Callable[[], object], scale: Scale, rounds: int = 10) -> Row:
    """Milliseconds of one call: wall, host (until it returns), and the device's kernels."""
    warm, rounds = (0, 1) if scale.tiny else (3, rounds)
    for _ in range(warm):
        call()
    wall, host = [], []
    for _ in range(rounds):
        scale.sync()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        scale.sync()
        wall.append(time.perf_counter() - start)
    row: Row = {"wall_ms": 1e3 * statistics.median(wall), "host_ms": 1e3 * statistics.median(host)}
    return row | kernels(call, scale)


def kernels(call: Callable[[], object], scale: Scale) -> Row:
    """Milliseconds of the device's kernels and copies in one call, and how many there were."""
    import torch

    if scale.device != "cuda":
        return {"kernel_ms": 0.0, "launches": 0, "copies": 0}
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        scale.sync()
    on_device = torch.autograd.DeviceType.CUDA
    events = [
        event
        for event in profile.events()
        if event.device_type == on_device and not getattr(event, "is_user_annotation", False)
    ]
    copies = [event for event in events if event.name.startswith(("Memcpy", "Memset"))]
    longest: Counter[str] = Counter()
    for event in events:
        longest[event.name[:80]] += event.time_range.elapsed_us()
    return {
        "kernel_ms": sum(longest.values()) / 1e3,
        "launches": len(events) - len(copies),
        "copies": len(copies),
        "longest_us": dict(longest.most_common(8)),
    }


def guarded(label: Row, find: Callable[[], Row]) -> Row:
    """A row, or one that says why there is none: one failure does not cost the rows after it."""
    try:
        return label | find()
    except Exception as error:  # noqa: BLE001 - whatever is raised is the row
        trace = "".join(traceback.format_exception(error)[-4:])
        print(trace, file=sys.stderr)
        return label | {"error": f"{type(error).__name__}: {str(error)[:500]}", "trace": trace}


# -- Steps ---------------------------------------------------------------------------------------


def environment(scale: Scale) -> Iterator[Case]:
    """Versions, the device, and its two ceilings: a copy's bandwidth, a matrix product's rate."""
    import torch

    import memtrain

    yield {}, memtrain.collect_env
    if scale.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        sizes = {"free_nbytes": free, "total_nbytes": total}
        yield {"properties": str(found)}, lambda: sizes
    n = 1 << (10 if scale.tiny else 28)
    x = torch.ones(n, dtype=torch.float32, device=scale.device)
    y = torch.empty_like(x)

    def copied() -> Row:
        found = clocks(lambda: y.copy_(x), scale)
        return found | {"gb_per_s": 2 * x.nbytes / found["wall_ms"] / 1e6}

    yield {"copy": "device to device", "nbytes": x.nbytes}, copied
    pinned = torch.empty(n // 8, pin_memory=scale.device == "cuda")
    for direction in ("to host", "from host"):
        pair = (pinned, x[: n // 8]) if direction == "to host" else (x[: n // 8], pinned)

        def moved(pair: Any = pair) -> Row:
            found = clocks(lambda: pair[0].copy_(pair[1], non_blocking=True), scale)
            return found | {"gb_per_s": pinned.nbytes / found["wall_ms"] / 1e6}

        yield {"copy": direction, "nbytes": pinned.nbytes}, moved
    size = 32 if scale.tiny else 8192
    a = torch.randn(size, size, device=scale.device, dtype=torch.bfloat16)

    def product() -> Row:
        found = clocks(lambda: a @ a, scale)
        return found | {"tflops": 2 * size**3 / found["wall_ms"] / 1e9}

    yield {"product": f"bfloat16 {size}"}, product


def driver(scale: Scale) -> Iterator[Case]:
    """Every kernel once or a few times, at odd sizes: does it launch at all?"""
    import torch

    opcheck = by_path(ROOT / "tests" / "kernels" / "test_opcheck.py")
    for name in opcheck.NAMES:

        def called(name: str = name) -> Row:
            op, count = getattr(torch.ops.memtrain, name).default, 0
            with torch.device(scale.device):
                cases = opcheck.CASES[name]()
                for arguments in cases[:1] if scale.tiny else cases:
                    op(*arguments)
                    count += 1
            scale.sync()
            return {"calls": count}

        yield {"op": name}, called
    for name, make in optimizers().items():
        yield {"step of": name}, partial(stepped, make, scale)


# Of parameters; all but the last large enough for their states to be quantised.
SHAPES = ((200, 77), (3, 50, 77), (5003,), (1, 4129), (301,))


def stepped(make: Callable[..., Any], scale: Scale) -> Row:
    """Two steps of an optimizer; the second reads states that the first made."""
    from benchmarks.adamw_step import make_params
    from memtrain.optim import state_bytes

    params = make_params(SHAPES, scale.device)
    optimizer = make(params)
    for _ in range(2):
        optimizer.step()
    scale.sync()
    each = state_bytes(optimizer) / sum(p.numel() for p in params)
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
    if has("xdist"):
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
    from benchmarks import activations
    from benchmarks.harness import Options

    sizes = ("powers=10", "ops=gelu:3,group:4") if scale.tiny else ("powers=26",)
    options = Options(
        scale.device, quick=scale.tiny, rounds=2 if scale.tiny else 5, overrides=sizes
    )
    for job in activations.jobs(options):
        if job.title.startswith("gpt2"):
            continue
        yield {"kernel": job.title}, lambda job=job: dict(job.run()[0])
    for name in LAYERS:
        for side in ("memtrain", "torch"):
            yield {"layer": name, "side": side}, partial(layer, name, side, scale)


LAYERS = ("layer norm", "rms norm", "batch norm", "max pool", "cross-entropy")


def layer(name: str, side: str, scale: Scale) -> Row:
    """Clocks of a layer's forward and backward in bfloat16."""
    import torch
    from torch import nn

    import memtrain

    class Fresh(nn.Module):
        """Makes what is given to the layer: the model's own input is never compressed."""

        def forward(self, x):
            return x + 0.0

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
    model = nn.Sequential(Fresh(), module).to(scale.device, torch.bfloat16)
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
    from benchmarks.optimizer import OURS
    from memtrain import optim

    exact = partial(optim.AdamW4bit, min_elements=1 << 40)
    two_bit = partial(optim.AdamW4bit, first="Lloyd-Max", second="factored")

    def split(weights: str, params: Any) -> Any:
        return optim.SplitWeights(optim.AdamW4bit(params), weights)

    others = {"AdamW4bit, 2-bit first": two_bit, "exact": exact}
    others |= {weights: partial(split, weights) for weights in ("bf16+8", "bf16+sr")}
    return {name: make for name, (make, _) in OURS.items()} | others


def optimizer(scale: Scale) -> Iterator[Case]:
    """A step over GPT-2-small's parameters: wall, host, kernels, and a graph's replay."""
    import torch

    from benchmarks.adamw_step import gpt2_small, make_params
    from benchmarks.optimizer import PEERS, peer
    from memtrain import optim

    shapes = [(8, 65), (65,)] if scale.tiny else gpt2_small()
    ours = {
        "AdamW4bit, rank-1": optim.AdamW4bit,
        "AdamW4bit, B128 both": partial(optim.AdamW4bit, second="B128/Linear"),
        "AdamW4bitFactor": optim.AdamW4bitFactor,
        "AdamW8bit": optim.AdamW8bit,
        "exact": partial(optim.AdamW4bit, min_elements=1 << 40),
        "torch fused": partial(torch.optim.AdamW, fused=True),
    }
    for name, make in list(ours.items())[-2 if scale.tiny else 0 :]:
        for dtype in ("float32",) if scale.tiny else ("float32", "bfloat16"):

            def measured(make: Any = make, dtype: str = dtype) -> Row:
                params = make_params(shapes, scale.device)
                for p in params:
                    p.data, p.grad = p.data.to(getattr(torch, dtype)), None
                    p.grad = torch.full_like(p, 1e-3)
                numel = sum(p.numel() for p in params)
                found = clocks(make(params).step, scale)
                if scale.device == "cuda":
                    replay = captured(make(params, capturable=True).step)
                    found |= {f"graph_{k}": v for k, v in clocks(replay, scale).items()}
                return found | {"parameters": numel, "tensors": len(params)}

            yield {"optimizer": name, "dtype": dtype}, measured
    params = make_params(shapes, scale.device)
    for name in PEERS:

        def theirs(name: str = name) -> Row:
            found = peer(name, params)
            return {"skipped": found} if isinstance(found, str) else clocks(found.step, scale)

        yield {"optimizer": name}, theirs


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The replay of a step captured into a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


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
    import torch

    import memtrain

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
    import torch

    from memtrain.audit.peak import StepOptions
    from memtrain.audit.peak.predict import predict

    def make() -> Row:
        options = StepOptions(autocast=torch.bfloat16)
        peak = predict(model, optimizer, batch, preset, options).peak
        return {"predicted_nbytes": peak.nbytes, "predicted_at": peak.label}

    return guarded({}, make)


def language_model(family: str, scale: Scale) -> tuple[Any, dict[str, Any]]:
    """GPT-2-small (batch 8 x 1024) or a Llama of 1.2 billion (4 x 1024), and a batch."""
    import torch
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
    import torch

    import memtrain

    presets = ("plain", "balanced") if scale.tiny else (
        "plain", "exact", "balanced", "checkpointed", "smallest", "fewbit3", "actnn_l3", "gact4",
    )  # fmt: skip
    for preset in presets:
        for extra in ((), ("gradients=release",)) if preset == "balanced" else ((),):

            def found(preset: str = preset, extra: Sequence[str] = extra) -> Row:
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

            yield {"preset": preset, "extra": list(extra)}, found


def waits(step: Callable[[], None], scale: Scale) -> Row:
    """How often a call waits for the device, and from where."""
    import torch

    places: Counter[str] = Counter()

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):  # not the mode's warning of itself
            frames = [f for f in traceback.extract_stack() if "gpu_session" not in f.filename][-6:]
            places[" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1])] += 1

    scale.sync()
    mode = torch.cuda.set_sync_debug_mode if scale.device == "cuda" else lambda level: None
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        mode("warn")
        try:
            step()
        finally:
            mode("default")
    return {"waits": sum(places.values()), "places": dict(places.most_common(20))}


STEPS: dict[str, Step] = {
    "environment": Step(60, environment),
    "driver": Step(120, driver, side_by_side=True),
    "kernel_tests": Step(240, kernel_tests),
    "optimizer": Step(120, optimizer),
    "gpt2": Step(120, partial(training, "gpt2", compiled=False)),
    "synchronisations": Step(120, synchronisations),
    "bandwidth": Step(150, bandwidth),
    "llama": Step(120, partial(training, "llama", compiled=False)),
    "gpt2_compiled": Step(240, partial(training, "gpt2", compiled=True)),
    "llama_compiled": Step(240, partial(training, "llama", compiled=True)),
    "sanitizer": Step(240, sanitizer),
}

# -- Running them --------------------------------------------------------------------------------


def by_path(path: Path) -> Any:
    """A module of a file that is in no package."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has(name: str) -> bool:
    """Whether a package is installed."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def emit(step: str, out: Path, row: Row) -> None:
    """Append a row, at once."""
    with out.open("a") as file:
        file.write(json.dumps({"step": step, **row}, default=str) + "\n")


def this(step: str, out: Path, first: int = 0, every: int = 1, *, tiny: bool = False) -> list[str]:
    """The command that runs, of a step's cases, the `first` and `every` so many after it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--step", step, "--out", str(out)]
    command += ["--cases", str(first), str(every)]
    return [*command, "--tiny"] if tiny else command


def run_step(name: str, out: Path, first: int, every: int, *, tiny: bool) -> None:
    """Run cases of a step, each row into `out` as it comes.

    After the first case that leaves the device faulted this process exits with `FAULTED`.
    """
    import torch

    from memtrain.kernels.dispatch import backend

    scale = Scale("cuda" if torch.cuda.is_available() and not tiny else "cpu", tiny, out)
    if STEPS[name].side_by_side and every == 1 and not tiny:
        number = len([*STEPS[name].cases(scale)])
        commands = [this(name, out, place, number) for place in range(first, number)]
        for place, why in side_by_side(commands):
            emit(name, out, {"case": place, "error": why})
        return
    with backend("triton") if scale.device == "cpu" else nullcontext():
        for at, (label, find) in enumerate(STEPS[name].cases(scale)):
            if at < first or (at - first) % every:
                continue
            emit(name, out, {"case": at, **label, "begun": True})
            row = {"case": at, **guarded(label, find)}
            try:
                scale.clear()
            except RuntimeError as error:  # it may be the first word of the case's fault
                emit(name, out, {"error": f"faulted: {str(error)[:500]}", **row})
                sys.stdout.flush()
                os._exit(FAULTED)  # what Python and torch tear down could abort
            emit(name, out, row)


def side_by_side(
    commands: Sequence[Sequence[str]], seconds: float = 100
) -> Iterator[tuple[int, str]]:
    """Run commands, as many at once as there are cores; the place of each that failed, and why."""

    def run(command: Sequence[str]) -> str:
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:g} s"
        sys.stderr.write(ended.stderr)
        status = ended.returncode
        return f"exit status {status}: {ended.stderr[-1500:]}" if status else ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for place, why in enumerate(pool.map(run, commands)):
            if why:
                yield place, why


def launch(name: str, command: Sequence[str], limit: float, out: Path) -> str:
    """Run a command as a step, with its children killed at the limit; how it ended."""
    with out.with_suffix(".log").open("a") as log:
        print(f"== {name}", file=log, flush=True)
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:  # where the session is ended too: the step's processes would go on
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return {0: "ok", FAULTED: "faulted"}.get(status, f"failed: {status}")


def run_whole(name: str, out: Path, limit: float, *, tiny: bool) -> str:
    """Run a step, after a case that ends its process from the next one; how it ended."""
    end, first = time.monotonic() + limit, 0
    while True:
        ended = launch(name, this(name, out, first, tiny=tiny), end - time.monotonic(), out)
        done = {row["case"]: "begun" not in row for row in rows_of(name, out) if "case" in row}
        case = max(done, default=-1)  # the last of that process, if one has begun there
        if ended == "out of time" or case < first or (ended == "ok" and done[case]):
            return ended
        if ended != "faulted":  # which the case's row says
            emit(name, out, {"case": case, "error": f"its process ended: {ended}"})
        first = case + 1


def rows_of(name: str, out: Path) -> list[Row]:
    """The rows of a step that runs, or has just run."""
    rows = map(json.loads, out.read_text().splitlines() if out.exists() else ())
    own: list[Row] = []
    for row in rows:
        if row["step"] == name:
            own = [] if "ended" in row else [*own, row]
    return own


def session(names: Sequence[str], out: Path, seconds: float, *, tiny: bool) -> int:
    """Run steps one after the other; returns how many did not end well."""
    session_start, bad = time.monotonic(), 0
    for name in names:
        start = time.monotonic()
        left = seconds - (start - session_start)
        limit = min(left, STEPS[name].limit * (4 if tiny else 1))  # the interpreter is slow
        ended = "not begun: the session's time is over"
        if left >= 5:
            ended = run_whole(name, out, limit, tiny=tiny)
        took = round(time.monotonic() - start, 1)
        errors = sum("error" in row or "failed" in row for row in rows_of(name, out))
        emit(name, out, {"ended": ended, "errors": errors, "seconds": took, "limit": limit})
        bad += ended != "ok" or errors > 0
        print(f"{name:18} {ended:14} {took:7.1f} s, {errors} errors", flush=True)
    return bad


def bring(folder: Path) -> int:
    """Put the pure-Python packages of `PACKAGES` into a folder."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(folder), *PACKAGES], check=False)
    for ignores in [*folder.rglob(".gitignore")]:  # by hydra's git would leave its parsers behind
        ignores.unlink()
    return done.returncode


def prepare(site: Path | None, *, tiny: bool) -> None:
    """Let this process and its children import memtrain, and run its kernels as they should."""
    paths = [str(ROOT), *([str(site.resolve())] if site else [])]
    sys.path[:0] = paths
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([old] if old else [])])
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRITON_INTERPRET" if tiny else "MEMTRAIN_GPU"] = "1"


def lacking(*, tiny: bool) -> str:
    """Name what every step needs and this machine lacks; empty where it lacks nothing."""
    for name in ("memtrain", "hydra.grammar.gen.OverrideLexer"):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - hydra without its parsers exits
            return f"{name} cannot be imported, {error!r}: see --bring and --site"
    import torch

    if tiny:
        return ""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; --tiny runs on a CPU"
    return no_launcher()


def no_launcher() -> str:
    """Why Triton could not compile what launches its kernels; empty where it could."""
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None or shutil.which(compiler) is None:
        return "Triton needs a C compiler to launch kernels: gcc or clang, or the one that CC names"
    headers = sysconfig.get_paths("posix_prefix")["include"]  # where Triton looks
    command = [compiler, "-fsyntax-only", "-I", headers, "-x", "c", "-"]
    done = subprocess.run(
        command, input="#include <Python.h>", capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"Triton needs Python.h, which is not in {headers}"


def main(given: Sequence[str] | None = None) -> int:
    """Exit status 1 if a step did not end well, 2 if none could."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bring", type=Path, metavar="FOLDER", help="download what it needs")
    parser.add_argument("--site", type=Path, help="a folder that --bring has made")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_session_out")))
    parser.add_argument("--steps", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--seconds", type=float, default=570, help="of all steps together")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs=2, type=int, default=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.out = args.out.resolve()  # steps change folder
    names = args.steps.split(",")
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"unknown steps {', '.join(unknown)}; allowed: {', '.join(STEPS)}")
    if args.bring:
        return bring(args.bring)
    prepare(args.site, tiny=args.tiny)
    if args.step:
        run_step(args.step, args.out, *args.cases, tiny=args.tiny)
        return 0
    if lacks := lacking(tiny=args.tiny):
        print(lacks, file=sys.stderr)
        return 2
    # So that `launch` ends the step that runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    args.out.mkdir(parents=True, exist_ok=True)
    left = args.seconds - (time.monotonic() - start)
    return min(1, session(names, args.out / "gpu_session.jsonl", left, tiny=args.tiny))


if __name__ == "__main__":
    sys.exit(main())
