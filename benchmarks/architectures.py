"""Every architecture of transformers that a small config builds: unmodified, exact, and compressed.

    python -m benchmarks run architectures [--set kinds=CausalLM names=llama,gpt2 preset=smallest]

Models of about a hundred thousand parameters take one forward and backward: plain, through the
identity (`exact`: the loss and every gradient must be bit-identical), and under a preset; and three
with every saved tensor rounded to bfloat16, after which no parameter's gradient may be another
one (`rounded_error`). Nothing is downloaded. What a small config does not build is a row that says
why.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import memtrain
from benchmarks.families import Case, compare, gradients, images, step, text
from benchmarks.harness import Benchmark, Job, Options, Row, require
from memtrain.audit.peak.predict import UnpredictableError

# Names that configs share; a config is given those that it knows.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "state_size": 8},
    **{"num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "vocab_size": 200},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
# Image models name their sizes in as many ways as there are: most are built at their own.
PARAMETERS = 30_000_000
"""More are not built."""
ROUNDED = "{compressor: {name: float, format: bf16}}"
"""The rule for all sites of the run that compresses, and loses next to nothing."""
ROUNDED_ERROR = 0.25
"""More is a wrong gradient: payloads mixed up have 1, sums that nearly cancel had 0.15 at most."""


class Kind(NamedTuple):
    """A family of model classes and its batch."""

    mapping: str
    """In transformers' table of automatic models."""
    batch: Callable[[], dict[str, Tensor]]


def _text() -> dict[str, Tensor]:
    """Tokens without the special ones: a row of padding is exactly zero, which groups are not."""
    return {name: tokens + 3 for name, tokens in text(4, 48, 197).items()}


def _classified() -> dict[str, Tensor]:
    return {**_text(), "labels": torch.randint(0, 2, (4,))}


KINDS = {
    "CausalLM": Kind("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _text),
    "Seq2SeqLM": Kind("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _text),
    "ImageClassification": Kind(
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", lambda: images(64, 4, 2)
    ),
    "SequenceClassification": Kind("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classified),
}


def names(kind: str) -> Mapping[str, Any]:
    """Architectures of a kind, and their model classes' names."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, KINDS[kind].mapping)


def build(kind: str, name: str, sizes: Mapping[str, int] = SMALL) -> Case:
    """A small model of an architecture, in training, and its batch.

    Raises:
        ValueError: If it has more than `PARAMETERS` parameters.
        Exception: Whatever transformers says of sizes that do not fit together.
    """
    import transformers

    config_class = transformers.CONFIG_MAPPING[name]
    renamed = getattr(config_class, "attribute_map", {})
    known = {*inspect.signature(config_class.__init__).parameters, *vars(config_class())}
    small = {"image_size": 64} if kind == "ImageClassification" else sizes
    options = {key: x for key, x in small.items() if key in known and key not in renamed}
    found = names(kind)[name]
    cls = getattr(transformers, found if isinstance(found, str) else found[0])
    config = config_class(**options)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    return Case(cls(config).train(), KINDS[kind].batch())


def _row(kind: str, name: str, preset: str) -> list[Row]:
    torch.manual_seed(0)
    label: Row = {"kind": kind, "architecture": name, "preset": preset}
    try:
        case = build(kind, name)
        own = [*case.model.parameters(), *case.model.buffers(), *case.batch.values()]  # type: ignore[union-attr]
        plain, again = (step(case, own, 0)[1] for _ in range(2))
    except Exception as error:  # noqa: BLE001 - transformers' own, of whatever kind
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        return [{**label, "left_out": why}]
    if not all(g.isfinite().all() for g in plain.values()):
        return [{**label, "left_out": "its plain gradient is not finite"}]
    repeats = _equal(plain, again)
    through = compare(case, ["preset=exact", "optim=none"], predict=False)
    if repeats:
        require(through["gradient_error"] == 0, f"{name}: the exact path changes a gradient")
    rounded = _rounded_error(case, plain) if repeats else float("nan")
    require(not rounded > ROUNDED_ERROR, f"{name}: a gradient of another tensor: {rounded}")
    cfg = [f"preset={preset}", "optim=none", "gradients=keep"]
    try:
        under = compare(case, cfg)
    except UnpredictableError:  # an op without a fake form of this dtype: the grouped product
        under = compare(case, cfg, predict=False)
    parameters = sum(p.numel() for p in case.model.parameters())
    row: Row = {**label, "left_out": "", "parameters": parameters, "exact": repeats}
    return [{**row, **under, "rounded_error": rounded}]


def _rounded_error(case: Case, plain: dict[str, Tensor]) -> float:
    """The largest error of a parameter's gradient in three forwards with all saves rounded.

    Relative to the gradient's norm, and a hundredth of what it were if all elements were equal:
    what is 0 but for rounding (a bias in front of a norm) has none. No meter runs, since it would
    keep the numbers of dead storages from being taken again.
    """
    cfg = ["preset=balanced", "optim=none", "gradients=keep", f"activations.rules=[{ROUNDED}]"]
    squares = sum(float(g.double().square().sum()) for g in plain.values())
    mean = (squares / sum(g.numel() for g in plain.values())) ** 0.5
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.0)
    model, optimizer = memtrain.wrap(case.model, optimizer, cfg)
    errors = [0.0]
    for _ in range(3):
        for name, found in gradients(case.model, case.loss, 0).items():
            expected = plain[name]
            norm = float(expected.norm()) + 0.01 * mean * expected.numel() ** 0.5
            errors.append(float((found - expected).norm()) / norm)
    memtrain.unwrap(model, optimizer)
    return max(errors)


def _equal(plain: dict[str, Tensor], again: dict[str, Tensor]) -> bool:
    return all(torch.equal(g, again[name]) for name, g in plain.items())


def _jobs(options: Options) -> list[Job]:
    chosen = {"kinds": ",".join(KINDS), "names": "", "preset": "balanced"}
    if options.quick:
        chosen |= {"kinds": "CausalLM", "names": "gpt2,llama"}
    chosen = options.settings(**chosen)
    only = set(chosen["names"].split(",")) - {""}
    return [
        Job(f"{name}, {kind}", partial(_row, kind, name, chosen["preset"]))
        for kind in chosen["kinds"].split(",")
        for name in names(kind)
        if not only or name in only
    ]


BENCHMARK = Benchmark(
    "architectures",
    "every architecture of transformers that a small config builds: exact, and under a preset",
    _jobs,
    (
        *("architecture", "kind", "exact", "ratio", "predicted_over_live", "gradient_cosine"),
        "rounded_error",
    ),
)
