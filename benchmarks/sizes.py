"""The largest model of a family, and the largest batch of one of its models, that fit a memory.

Each row is a family, a way to train and a memory: the largest of the published sizes whose
predicted peak at one sample fits, and the largest batch of the family's reference model. Peaks are
simulated step by step as a CUDA device runs them (`memtrain.audit.peak.predict`): nothing is
allocated, and no GPU is needed; how far they hold is what the benchmarks of peaks say. What a CUDA
context takes (a few hundred MiB) is not in them.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

from benchmarks.harness import Benchmark, Job, Options, Row
from memtrain.audit.peak import StepOptions
from memtrain.audit.peak.largest import search
from memtrain.audit.peak.predict import predict
from memtrain.cli.models.build_model import context, from_family
from memtrain.cli.models.named_models import NAMED_MODELS, NamedModel
from memtrain.cli.models.request import Request
from memtrain.planner import ALLOWED, Goal, smallest_peak

GIB = 2**30
MEMORIES = (8, 16, 24, 80)
MOST = 4096
PLANNED = "planner, bf16"


def _of(config: str, task: str, seq: int, **options: Any) -> NamedModel:
    return NamedModel(config=config, task=task, options=options, seq=seq)


def _opt(width: int, layers: int, heads: int) -> NamedModel:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"ffn_dim": 4 * width, "word_embed_proj_dim": width}
    return _of("OPTConfig", "CausalLM", 2048, **sizes, **more)


def _gpt(width: int, layers: int, heads: int) -> NamedModel:
    return _of("GPT2Config", "CausalLM", 1024, n_embd=width, n_layer=layers, n_head=heads)


def _llama(width: int, layers: int, heads: int, hidden: int, **more: Any) -> NamedModel:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _of("LlamaConfig", "CausalLM", 2048, **sizes, intermediate_size=hidden, **more)


def _vit(width: int, layers: int, heads: int, patch: int, hidden: int) -> NamedModel:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"patch_size": patch, "intermediate_size": hidden, "num_labels": 1000}
    return _of("ViTConfig", "ImageClassification", 0, **sizes, **more)


FAMILIES: dict[str, dict[str, NamedModel]] = {
    "GPT-2": {
        **{name: NAMED_MODELS[name] for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
        "gpt3-2.7b": _gpt(2560, 32, 32),
        "gpt3-6.7b": _gpt(4096, 32, 32),
        "gpt3-13b": _gpt(5120, 40, 40),
    },
    "OPT": {
        "opt-125m": _opt(768, 12, 12),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
        "opt-6.7b": _opt(4096, 32, 32),
        "opt-13b": _opt(5120, 40, 40),
        "opt-30b": _opt(7168, 48, 56),
        "opt-66b": _opt(9216, 64, 72),
    },
    "Llama": {
        "llama-1.1b": _llama(2048, 22, 32, 5632, num_key_value_heads=4),
        "llama-3b": _llama(3200, 26, 32, 8640),
        "llama-7b": NAMED_MODELS["llama-7b"],
        "llama-13b": NAMED_MODELS["llama-13b"],
        "llama-30b": _llama(6656, 60, 52, 17920),
        "llama-65b": _llama(8192, 80, 64, 22016),
    },
    "ViT": {
        "vit-base": NAMED_MODELS["vit"],
        "vit-large": NAMED_MODELS["vit-large"],
        "vit-huge": _vit(1280, 32, 16, 14, 5120),
        "vit-giant": _vit(1408, 40, 16, 14, 6144),
        "vit-gigantic": _vit(1664, 48, 16, 14, 8192),
    },
}
"""Family -> its published sizes, smallest first; the second is the reference of batches."""

WAYS: Mapping[str, tuple[str, Any]] = {
    "plain, fp32": ("float32", None),
    "checkpointing, fp32": ("float32", None),
    "balanced, fp32": ("float32", "balanced"),
    "checkpointed, fp32": ("float32", "checkpointed"),
    "plain, bf16": ("bfloat16", None),
    "all_four, bf16": ("bfloat16", "all_four"),
    "all_four_2bit, bf16": ("bfloat16", "all_four_2bit"),
    PLANNED: ("bfloat16", None),
}
"""A way to train -> the dtype of weights and activations, and the preset; AdamW throughout."""
STEP = StepOptions(device="cuda:sm_90")
GOAL = Goal(allow=ALLOWED, sensitivity="analytic", options=STEP)
"""The planner may use all that it knows, within its default noise."""


class Sizes:
    """A family under a way to train."""

    def __init__(self, family: str, way: str) -> None:
        self.family, self.way = family, way
        self.dtype, self.preset = WAYS[way]
        self.names = list(FAMILIES[family])
        self.peak, self.parameters = cache(self._peak), cache(self._parameters)

    def built(self, name: str, batch: int) -> Any:
        """Model, optimizer and batch, without memory."""
        asked: Any = {"dtype": self.dtype, "device": STEP.device, "dropout": 0.0}
        request = Request(model=name, batch=batch, **asked)
        with context(getattr(torch, self.dtype), real=False):
            model, inputs = from_family(FAMILIES[self.family][name], request)
            model.train()
            if self.way.startswith("checkpointing"):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, inputs

    def _peak(self, name: str, batch: int) -> int:
        if self.way == PLANNED:  # one search of plans serves every memory
            return smallest_peak(*self.built(name, batch), goal=GOAL).nbytes
        return predict(*self.built(name, batch), self.preset, STEP).peak.nbytes

    def weights(self, name: str) -> int:
        """Return the bytes that every variant of a step stores throughout, without a simulation."""
        return self.parameters(name) * getattr(torch, self.dtype).itemsize

    def fits(self, name: str, batch: int, memory: int) -> int:
        """The peak in bytes, or 0 if it does not fit."""
        if self.weights(name) > memory:
            return 0
        peak = self.peak(name, batch)
        return peak if peak <= memory else 0

    def largest(self, memory: int) -> tuple[str, int]:
        """The largest model that fits at one sample, and its peak."""
        found = ("none", 0)
        for name in self.names:
            peak = self.fits(name, 1, memory)
            if not peak:
                break
            found = (name, peak)
        return found

    def row(self, gib: int) -> Row:
        """Find what fits a memory."""
        memory = gib * GIB
        name, peak = self.largest(memory)
        reference = self.names[1]
        row: Row = {"family": self.family, "way": self.way, "memory_gib": gib}
        row |= {"largest": name, "parameters": self.parameters(name), "peak_nbytes": peak}
        row["reference"] = reference
        row["batch"] = search(partial(self.peak, reference), memory, MOST)
        return row | {"device_predicted": STEP.device}

    def _parameters(self, name: str) -> int:
        """Of a model of the family; 0 of none."""
        return 0 if name == "none" else sum(p.numel() for p in self.built(name, 1)[0].parameters())


def _rows(family: str, way: str, memories: tuple[int, ...]) -> list[Row]:
    sizes = Sizes(family, way)
    return [sizes.row(gib) for gib in memories]


def _jobs(options: Options) -> list[Job]:
    names = {"families": ";".join(FAMILIES), "ways": ";".join(WAYS)}
    if options.quick:
        names = {"families": "ViT", "ways": "balanced, fp32"}
    chosen = options.settings(**names)
    memories = MEMORIES[:1] if options.quick else MEMORIES
    return [
        Job(
            f"{family}, {way}",
            partial(_rows, family, way, memories),
            {"family": family, "way": way},
        )
        for family in chosen["families"].split(";")
        for way in chosen["ways"].split(";")
    ]


BENCHMARK = Benchmark(
    "sizes",
    "the largest models and batches that fit 8, 16, 24 and 80 GiB, by predicted peaks",
    _jobs,
    ("family", "way", "memory_gib", "largest", "peak_nbytes", "reference", "batch"),
)
