"""Training steps inside torch.compile: bytes held between forward and backward, peak, time, error.

Each case runs in a process of its own under `benchmarks.tracker`, which counts what it asks
of malloc: Python's and libraries' own are among it, but not what was alive before the step.
Settings: `--set blocks=4 batch=4 sequence=512 width=768 cases=compiled,ours_balanced model=gpt2`.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import tracker
from benchmarks.harness import Benchmark, Job, Options, Row

# Name -> how the model is run: compiled whole or by blocks, wrapped with which preset,
# checkpointed (all of a block, or all but its matrix products), memory budget, GELU an op of its
# own that keeps codes of its derivative.
CASES = {
    "eager": {},
    "compiled": {"compiled": True},
    "ours_balanced": {"compiled": True, "preset": "balanced"},
    "compiled_checkpointed": {"compiled": True, "checkpointed": True},
    "ours_smallest": {"compiled": True, "preset": "smallest"},
    "ours_codes": {"compiled": True, "preset": "balanced", "codes": True},
    "eager_balanced": {"preset": "balanced"},
    **{
        f"{name}_budget_{budget}": {**case, "budget": budget}
        for name, case in {
            "compiled": {"compiled": True},
            "ours_balanced": {"compiled": True, "preset": "balanced"},
            "blocks_compiled": {"compiled": "blocks"},
            "blocks_balanced": {"compiled": "blocks", "preset": "balanced"},
        }.items()
        for budget in (0.5, 0.3, 0.0)
    },
    "compiled_fp8_pass": {"compiled": True, "fp8": True},
    "compiled_selective": {"compiled": True, "checkpointed": "selective"},
    "blocks_compiled": {"compiled": "blocks"},
    "blocks_balanced": {"compiled": "blocks", "preset": "balanced"},
    "blocks_smallest": {"compiled": "blocks", "preset": "smallest"},
    "blocks_checkpointed": {"compiled": "blocks", "checkpointed": True},
}


def build(case):  # noqa: C901 (two kinds of block)
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options = {}
    if case.get("checkpointed") == "selective":
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(products)
    width, llama = case["width"], case["model"] == "llama"

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width, bias=not llama)
            self.out = nn.Linear(width, width, bias=not llama)

        def forward(self, x):
            samples, tokens, _ = x.shape
            heads = (samples, tokens, width // 64, 64)
            q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).reshape(samples, tokens, width))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.attention, self.ln2 = (
                nn.LayerNorm(width),
                Attention(),
                nn.LayerNorm(width),
            )
            self.up, self.act = nn.Linear(width, 4 * width), nn.GELU(approximate="tanh")
            if case.get("codes"):
                self.act = coded_gelu()
            self.down = nn.Linear(4 * width, width)

        def forward(self, x):
            x = x + self.attention(self.ln1(x))
            return x + self.down(self.act(self.up(self.ln2(x))))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            wide = 8 * width // 3 // 64 * 64
            self.ln1, self.attention, self.ln2 = nn.RMSNorm(width), Attention(), nn.RMSNorm(width)
            self.gate = nn.Linear(width, wide, bias=False)
            self.up = nn.Linear(width, wide, bias=False)
            self.down = nn.Linear(wide, width, bias=False)

        def forward(self, x):
            x = x + self.attention(self.ln1(x))
            h = self.ln2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            block = Llama if llama else GPT2
            self.h = nn.ModuleList(block() for _ in range(case["blocks"]))

        def forward(self, x):
            for block in self.h:
                if case.get("checkpointed"):
                    x = checkpoint(block, x, use_reentrant=False, **options)
                else:
                    x = block(x)
            return x

    torch.manual_seed(0)
    return Blocks().to(torch.bfloat16 if llama else torch.float32)


def coded_gelu():
    """A GELU that a graph holds as an op, whose backward reads codes of 3 bits alone."""
    import torch
    from torch import Tensor, nn

    from memtrain.compressors import DerivativeCode
    from memtrain.kernels.derivative import derivative

    table = DerivativeCode(bits=3, function="gelu_tanh").table()

    @torch.library.custom_op("benchmarks::coded_gelu", mutates_args=())
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        sides = {"parity": table.parity, "shift": table.shift}
        return derivative.forward(x, "gelu_tanh", table.boundaries, **sides)

    @torch.library.custom_op("benchmarks::coded_gelu_backward", mutates_args=())
    def backward(grad: Tensor, codes: Tensor) -> Tensor:
        return derivative.backward(grad.contiguous(), codes, table.levels)

    @forward.register_fake
    def _(x):
        return torch.empty_like(x), x.new_empty((-(-x.numel() // 256), 32 * 3), dtype=torch.uint8)

    @backward.register_fake
    def _(grad, codes):
        return torch.empty_like(grad, memory_format=torch.contiguous_format)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output[1])

    forward.register_autograd(
        lambda ctx, grad, _: backward(grad, *ctx.saved_tensors), setup_context=keep
    )

    class Coded(nn.Module):
        def forward(self, x):
            return forward(x)[0]

    return Coded()


def processor():
    """Seconds of the processor, of compilers that this process has started too."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def measure(case):
    import torch
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    import memtrain

    dtype = torch.bfloat16 if case["model"] == "llama" else torch.float32
    model = build(case)
    x = torch.randn(case["batch"], case["sequence"], case["width"], dtype=dtype)
    target = torch.randn_like(x)
    if case.get("preset"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memtrain.wrap(model, optimizer, [f"preset={case['preset']}", "optim=none"])
    if "budget" in case:
        functorch_config.activation_memory_budget = case["budget"]
    if case.get("fp8"):
        # By itself it takes bfloat16 tensors of 100 MiB and more, and scales in the forward alone.
        inductor_config.post_grad_fusion_options["activation_quantization_aten_pass"] = {
            "quant_type": "torch.float8_e4m3fn",
            "allowed_dtypes": "torch.float32;torch.bfloat16",
            "size_in_mb": 0,
            "use_scaling": True,
        }
    run = torch.compile(model) if case.get("compiled") is True else model
    if case.get("compiled") == "blocks":
        for block in model.h:
            block.compile()

    now = processor if case["clock"] == "cpu" else time.perf_counter

    def step():
        start = now()
        before = tracker.live()
        loss = (run(x) * target).mean()
        held = tracker.live() - before
        loss.backward()
        return held, now() - start

    _, first = step()  # gradients' memory is there from now on
    held, seconds, peaks = 0, [], []
    for _ in range(case["rounds"]):
        model.zero_grad(set_to_none=False)
        tracker.restart()
        before = tracker.live()
        held, took = step()
        peaks.append(tracker.peak() - before)
        seconds.append(took)
    graphs = sys.modules.get("torch._dynamo.utils")
    torch.save([p.grad for p in model.parameters()], case["gradients"])
    return {
        "held_mib": round(held / 2**20, 1),
        "peak_mib": round(statistics.median(peaks) / 2**20, 1),
        "step_s": round(statistics.median(seconds), 3),
        "first_step_s": round(first, 1),
        "graphs": graphs.counters["stats"].get("unique_graphs", 0) if graphs else 0,
    }


def cosine(one: Path, other: Path) -> float:
    """Of two saved gradients."""
    import torch
    import torch.nn.functional as F

    flat = [torch.cat([g.flatten().double() for g in torch.load(path)]) for path in (one, other)]
    return F.cosine_similarity(*flat, dim=0).item()


def jobs(options: Options) -> list[Job]:
    case = {"model": "gpt2", "blocks": 4, "batch": 4, "sequence": 512, "width": 768}
    case |= {"rounds": options.rounds, "clock": options.clock}
    if options.quick:
        case |= {"blocks": 1, "batch": 1, "sequence": 64, "width": 64}
    names = [*CASES]
    for key, value in (pair.split("=") for pair in options.overrides):
        if key == "cases":
            names = value.split(",")
        else:
            case[key] = value if key == "model" else int(value)
    folder = Path("build")
    folder.mkdir(exist_ok=True)

    def row(name: str) -> list[Row]:
        own = folder / f"compile_{case['model']}_{name}.pt"
        full = {**case, **CASES[name], "gradients": str(own.resolve())}
        result = _in_a_process(full)
        exact = folder / f"compile_{case['model']}_eager.pt"
        close = round(cosine(exact, own), 5) if exact.exists() else ""
        shown = {key: case[key] for key in ("model", "blocks", "batch", "sequence", "width")}
        return [{"case": name, **shown, **result, "gradient_cosine": close}]

    return [Job(name, lambda name=name: row(name)) for name in names]


def _in_a_process(case):
    with tempfile.TemporaryDirectory() as folder:  # nothing is compiled yet
        given = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        result = tracker.run(
            ["-m", "benchmarks.compile", json.dumps({**case, "environment": given})],
            check=True,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
        )
    return json.loads(result.stdout.splitlines()[-1])


BENCHMARK = Benchmark(
    "compile",
    "training steps inside torch.compile: held bytes, peak, time, gradient",
    jobs,
    ("case", "held_mib", "peak_mib", "step_s", "first_step_s", "graphs", "gradient_cosine"),
)

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    os.environ.update(asked["environment"])  # which inductor reads when it is imported
    print(json.dumps(measure(asked)))
