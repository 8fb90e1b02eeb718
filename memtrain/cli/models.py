"""What `memtrain-report model=...` names: a model without memory, and what it is called with."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer

from memtrain.config import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}
_DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "drop_path_rate")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A named model: its transformers config, and the task that it is trained for."""

    config: str
    """Name of the config class."""
    task: str
    """`CausalLM`, `MaskedLM`, `Seq2SeqLM` or `ImageClassification`: that `AutoModelFor` class."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The config's arguments."""
    seq: int = 512
    """Tokens, unless told."""
    longest: int = 0
    """Most tokens that its learned positions take; 0 has none."""


def _gpt2(width: int, layers: int, heads: int) -> Family:
    options = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return Family(config="GPT2Config", task="CausalLM", options=options, seq=1024, longest=1024)


def _llama(width: int, layers: int, heads: int, hidden: int) -> Family:
    options = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
    }
    return Family(config="LlamaConfig", task="CausalLM", options=options, seq=2048)


def _roberta(width: int, layers: int, heads: int) -> Family:
    options = {
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    return Family(config="RobertaConfig", task="MaskedLM", options=options, longest=512)


def _image(config: str) -> Family:
    return Family(config=config, task="ImageClassification", options={"num_labels": 1000})


FAMILIES = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-13b": _llama(5120, 40, 40, 13824),
    "opt-125m": Family(config="OPTConfig", task="CausalLM", seq=2048, longest=2048),
    "t5-small": Family(
        config="T5Config", task="Seq2SeqLM", options={"decoder_start_token_id": 0}, seq=512
    ),
    "bert-base": Family(config="BertConfig", task="MaskedLM", longest=512),
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "vit": _image("ViTConfig"),
    "swin": _image("SwinConfig"),
    "resnet50": _image("ResNetConfig"),
}


@dataclass(kw_only=True)
class Request:
    """What `memtrain-report` is asked for, besides memtrain's own keys."""

    model: str = ""
    """A name of `FAMILIES`, `hf:<config.json or its folder>` or `py:<module>:<builder>`."""
    batch: int = 1
    """Samples."""
    seq: int | None = None
    """Tokens per sample, for text."""
    image: int | None = None
    """Height and width, for images; 224 by default."""
    dtype: str = "float32"
    """Of weights, gradients and activations."""
    labels: bool = True
    """Whether the model gets labels, so that the loss's saved tensors count."""
    attention: str | None = None
    """`eager` or `sdpa`; transformers' choice by default."""
    dropout: float | None = None
    """Every dropout of the config; as the config says by default."""
    optimizer: str = "adamw"
    """A name of `OPTIMIZERS`."""

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                value = getattr(self, name)
                raise ValueError(f"unknown {name} {value!r}; {nearest(value, list(allowed))}")
        if self.attention not in (None, "eager", "sdpa"):
            hint = nearest(str(self.attention), ["eager", "sdpa"])
            raise ValueError(f"unknown attention {self.attention!r}; {hint}")
        for name in ("batch", "seq", "image"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is out of range; allowed: 1 or more")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is out of range; allowed: 0 to below 1")


class Built(NamedTuple):
    """A model of fake tensors, its optimizer, and what it is called with."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any


def build(request: Request, *, real: bool = False) -> Built:
    """Make what a request names, under fake tensors: no weight is allocated.

    Args:
        request: What to make.
        real: Make it with its memory and with initial weights instead.

    Returns:
        Model in training mode, optimizer and batch.

    Raises:
        ValueError: For an unknown model, or a size that the model does not take.
        ModuleNotFoundError: If transformers is missing and needed; names the extra.
        FileNotFoundError: For an `hf:` path that does not exist.
        TypeError: If a builder returns something else than a model and a batch.

    Memory:
        Python objects only, unless `real`.
    """
    kind, _, rest = request.model.partition(":")
    with _context(DTYPES[request.dtype], real=real):
        if kind == "py" and rest:
            model, batch, *others = _user(rest, request)
        elif kind == "hf" and rest:
            model, batch = _transformers(_stored(Path(rest)), request)
            others = []
        elif request.model in FAMILIES:
            model, batch = _transformers(FAMILIES[request.model], request)
            others = []
        else:
            allowed = [*FAMILIES, "hf:<path>", "py:<module>:<builder>"]
            raise ValueError(f"unknown model {request.model!r}; {nearest(request.model, allowed)}")
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = others[0] if others else OPTIMIZERS[request.optimizer](trained)
    return Built(model, optimizer, batch)


@contextmanager
def _context(dtype: torch.dtype, *, real: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(before)


def _import_transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this model needs transformers: pip install transformers (or 'memtrain[test]')"
        ) from error
    transformers.logging.set_verbosity_error()  # its advice is about training, not about sizes
    return transformers


def _stored(path: Path) -> Family:
    """A family from a transformers config on disk; nothing is ever downloaded."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"model=hf:{path}: {str(file)!r} does not exist")
    transformers = _import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model=hf:{path}: {str(error).splitlines()[0]}") from error
    tasks = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification")
    known = [
        task
        for task in tasks
        if type(config) in getattr(transformers, f"AutoModelFor{task}")._model_mapping
    ]
    written = " ".join(config.architectures or ())
    suffixes = {"LMHeadModel": "CausalLM", "ForConditionalGeneration": "Seq2SeqLM"}
    suffixes |= {f"For{task}": task for task in tasks}
    named = [task for suffix, task in suffixes.items() if suffix in written and task in known]
    if not known:
        raise ValueError(
            f"model=hf:{path}: no task for {type(config).__name__}; allowed: {', '.join(tasks)}; "
            "model=py:<module>:<builder> takes any model"
        )
    options = config.to_diff_dict()
    return Family(config=type(config).__name__, task=[*named, *known][0], options=options)


def _transformers(family: Family, request: Request) -> tuple[nn.Module, dict[str, Any]]:
    transformers = _import_transformers()
    from transformers.initialization import no_init_weights

    config = getattr(transformers, family.config)(**family.options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if request.dropout is not None:
        for name in [name for name in vars(config) if name.endswith(_DROPOUTS)]:
            setattr(config, name, float(request.dropout))
    batch = _batch(family, config, request)
    chosen = {"attn_implementation": request.attention} if request.attention else {}
    auto = getattr(transformers, f"AutoModelFor{family.task}")
    # Initial values read data, which fake tensors do not have; sizes do not depend on them.
    fake = active_fake_mode() is not None
    with no_init_weights() if fake else nullcontext():
        model = auto.from_config(config, dtype=DTYPES[request.dtype], **chosen)
    model.tie_weights()
    return model, batch


def _batch(family: Family, config: Any, request: Request) -> dict[str, Any]:
    if family.task == "ImageClassification":
        if request.seq is not None:
            raise ValueError(f"seq={request.seq}: {request.model} takes images; use image=")
        side = request.image or getattr(config, "image_size", 224)
        if getattr(config, "image_size", side) != side:
            config.image_size = side  # its positions are made for one size
        batch = {"pixel_values": torch.zeros(request.batch, config.num_channels, side, side)}
        labels = torch.zeros(request.batch, dtype=torch.long)
        return {**batch, "labels": labels} if request.labels else batch
    if request.image is not None:
        raise ValueError(f"image={request.image}: {request.model} takes text; use seq=")
    seq = request.seq or family.seq
    if family.longest and seq > family.longest:
        raise ValueError(f"seq={seq}: {request.model} takes at most {family.longest} tokens")
    tokens = torch.zeros(request.batch, seq, dtype=torch.long)
    batch = {"input_ids": tokens}
    if family.task == "Seq2SeqLM" and not request.labels:
        batch["decoder_input_ids"] = tokens.clone()
    return {**batch, "labels": tokens.clone()} if request.labels else batch


def _user(where: str, request: Request) -> tuple[Any, ...]:
    """Call a user's builder with those of the request's values that it has arguments for."""
    module, _, name = where.partition(":")
    if not name:
        raise ValueError(f"model='py:{where}' names no builder; allowed: py:<module>:<builder>")
    if "" not in sys.path:  # a console script does not look into the working directory
        sys.path.insert(0, "")
    builder = getattr(importlib.import_module(module), name, None)
    if not callable(builder):
        raise ValueError(f"model='py:{where}': {module} has no function {name!r}")
    known = set(inspect.signature(builder).parameters)
    values = {"batch": request.batch, "seq": request.seq, "image": request.image}
    result: Any
    try:
        result = builder(**{k: v for k, v in values.items() if k in known and v is not None})
    except Exception as error:  # the user's code may raise anything
        why = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(f"model='py:{where}' raised {type(error).__name__}: {why}") from error
    sound = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
    if not sound or not isinstance(([*result, None])[2], Optimizer | None):
        raise TypeError(
            f"model='py:{where}' returned {type(result).__name__}; allowed: (model, batch) or "
            "(model, batch, optimizer)"
        )
    return result
