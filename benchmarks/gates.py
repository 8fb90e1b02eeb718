"""Ways to keep a gated MLP's tensors: bits per hidden element, and the gradient's error.

`down(f(gate(x)) * up(x))` makes three tensors that plain PyTorch saves: the input g of f, and the
two factors f(g) and u of the product (what `down` reads is a fourth). The ways to keep them:

- groups: each of the three has a payload of its own;
- codes: derivative codes for f, payloads for the two factors;
- derived: payloads for g and u alone; f(g) is computed again from g's.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Benchmark, GateError, Job, Options, Row
from memtrain.activations.intercept.hooks import Interception
from memtrain.activations.intercept.options import Options as Handling
from memtrain.activations.saved.site import Record, Site
from memtrain.compressors import Compressor, DerivativeCode, Group

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


class GatedMLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int, hidden: int, function: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down, self.function = nn.Linear(hidden, width), FUNCTIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        return self.down(self.function(self.gate(x)) * self.up(x))


def _groups(bits: int, site: Site) -> Compressor:
    return Group(bits=bits)


def _codes(code: int, bits: int, site: Site) -> Compressor:
    return DerivativeCode(bits=code) if site.op in FUNCTIONS else Group(bits=bits)


def _derived(wide: int, bits: int, site: Site) -> Compressor:
    return Group(bits=wide if site.op in FUNCTIONS else bits)


WAYS: dict[str, tuple[Callable[[Site], Compressor], bool]] = {
    "groups 4": (partial(_groups, 4), False),
    "codes 3, groups 4": (partial(_codes, 3, 4), False),
    "codes 2, groups 4": (partial(_codes, 2, 4), False),
    "derived, g 4, u 4": (partial(_derived, 4, 4), True),
    "derived, g 5, u 4": (partial(_derived, 5, 4), True),
    "groups 2": (partial(_groups, 2), False),
    "codes 2, groups 2": (partial(_codes, 2, 2), False),
    "derived, g 2, u 2": (partial(_derived, 2, 2), True),
    "derived, g 3, u 2": (partial(_derived, 3, 2), True),
}


def _gradients(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"input": x.grad, **named} if x.grad is not None else named


def _row(function: str, name: str, tokens: int, width: int, seeds: int) -> list[Row]:
    torch.manual_seed(0)
    hidden = 3 * width
    model = GatedMLP(width, hidden, function)
    x, dy = torch.randn(tokens, width), torch.randn(tokens, width)
    with torch.no_grad():  # pre-activations of unit variance, as after a norm
        for layer in (model.gate, model.up):
            layer.weight.normal_(0, width**-0.5)
    exact = _gradients(model, x, dy)
    choose, derive = WAYS[name]
    square, records = dict.fromkeys(exact, 0.0), list[Record]()
    for seed in range(seeds):
        records.clear()
        interception = Interception(
            model,
            choose,
            options=Handling(min_elements=0, derive_outputs=derive),
            seed=seed,
            on_saved=records.extend,
        )
        interception.attach()
        found = _gradients(model, x, dy)
        interception.detach()
        for key, value in found.items():
            square[key] += float((value - exact[key]).square().sum() / exact[key].square().sum())
    own = [record for record in records if record.site.op in (function, "mul")]
    if not own:
        raise GateError(f"{function}: nothing was intercepted")
    error = {f"error_{key}": (total / seeds) ** 0.5 for key, total in square.items()}
    return [
        {
            "function": function,
            "way": name,
            "tokens": tokens,
            "width": width,
            "hidden": hidden,
            "seeds": seeds,
            "bits_per_element": 8 * sum(r.planned for r in own) / (tokens * hidden),
            **{key: value for key, value in error.items() if "bias" not in key},
        }
    ]


def _jobs(options: Options) -> list[Job]:
    tokens, width, seeds = (64, 32, 2) if options.quick else (1024, 256, 8)
    return [
        Job(f"{function}, {name}", partial(_row, function, name, tokens, width, seeds))
        for function in FUNCTIONS
        for name in WAYS
    ]


BENCHMARK = Benchmark(
    "gates",
    "a gated MLP: bits kept per hidden element, relative error of the gradients",
    _jobs,
    ("function", "way", "bits_per_element", "error_gate.weight", "error_up.weight", "error_input"),
)
