"""Models from transformers' config classes, with what they are called with; never a download."""

import importlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode

from memtrain.cli.models.families import TASKS, Family
from memtrain.cli.report.request_fields import DTYPES, Request

_DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "drop_path_rate")


def _import_transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this model needs transformers: pip install 'memtrain[models]'"
        ) from error
    transformers.logging.set_verbosity_error()  # its advice is about training, not about sizes
    return transformers


def stored(path: Path) -> Family:
    """A family from a transformers config on disk.

    Args:
        path: A config.json, or its folder.

    Returns:
        The config's class and differences from its defaults, and the task that its
        `architectures` name, else the first that it has a model for.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no config, or of a model that takes neither text nor images.
        ModuleNotFoundError: Without transformers; names the extra.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"model=hf:{path}: {str(file)!r} does not exist")
    transformers = _import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model=hf:{path}: {str(error).splitlines()[0]}") from error
    known = [
        task
        for task in TASKS
        if type(config) in getattr(transformers, f"AutoModelFor{task}")._model_mapping
    ]
    written = " ".join(config.architectures or ())
    suffixes = {"LMHeadModel": "CausalLM", "ForConditionalGeneration": "Seq2SeqLM"}
    suffixes |= {f"For{task}": task for task in TASKS}
    named = [task for suffix, task in suffixes.items() if suffix in written and task in known]
    if not known:
        raise ValueError(
            f"model=hf:{path}: no task for {type(config).__name__}; allowed: {', '.join(TASKS)}; "
            "model=py:<module>:<builder> takes any model"
        )
    own = Family(
        config=type(config).__name__, task=[*named, *known][0], options=config.to_diff_dict()
    )
    longest = getattr(config, "max_position_embeddings", None) or own.seq
    return replace(own, seq=min(own.seq, longest))


def from_family(family: Family, request: Request) -> tuple[nn.Module, dict[str, Any]]:
    """A family's model and batch, as the request wants them.

    Args:
        family: Config class, its arguments and the task.
        request: Sizes, dtype, labels, attention and dropout.

    Returns:
        The model, without initial values under a fake mode, and a batch of zeros.

    Raises:
        ValueError: For a size that the model does not take.
        ModuleNotFoundError: Without transformers; names the extra.
    """
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
    auto = getattr(transformers, f"AutoModelFor{family.task}" if family.task else "AutoModel")
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
