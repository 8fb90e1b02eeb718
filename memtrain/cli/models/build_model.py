"""Models by name, from a transformers config or a user-defined function, fake or real."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memtrain.cli.models.named_models import NAMED_MODELS, TASKS, NamedModel
from memtrain.cli.models.request import DTYPES, OPTIMIZERS, Request
from memtrain.config.errors import nearest
from memtrain.config.transformers_configs import (
    import_transformers,
    prepare_for_training,
    read_config,
    tasks_of,
)
from memtrain.config.user_functions import user_function
from memtrain.training.networks import compile_in_place

Built = tuple[nn.Module, Optimizer, Any]
"""A model, its optimizer, and what the model is called with."""


def build(request: Request, *, real: bool = False) -> Built:
    """Build the model of a request under fake tensors: no weight is allocated."""
    kind, _, rest = request.model.partition(":")
    with context(DTYPES[request.dtype], real=real):
        if kind == "py" and rest:
            model, batch, *others = _user(rest, request)
        elif kind == "hf" and rest:
            model, batch = build_named(_model_from_config_file(rest), request)
            others = []
        elif request.model in NAMED_MODELS:
            model, batch = build_named(NAMED_MODELS[request.model], request)
            others = []
        else:
            hint = nearest(request.model, known_models())
            raise ValueError(f"unknown model {request.model!r}; {hint}")
        model.train()
        compile_in_place(model, request.compile)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = others[0] if others else OPTIMIZERS[request.optimizer](trained)
    return model, optimizer, batch


def known_models() -> list[str]:
    """Return the allowed values of `model=`."""
    return [*NAMED_MODELS, "hf:<config.json or its folder>", "py:<module>:<function>"]


@contextmanager
def context(dtype: torch.dtype, *, real: bool) -> Iterator[None]:
    """Build models under fake tensors, unless `real`, within this context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if real:
            yield
        else:
            with _without_memos(FakeTensorMode(allow_non_fake_inputs=True)), _ComputeLinspace():
                yield
    finally:
        torch.set_default_dtype(before)


def _without_memos(mode: FakeTensorMode) -> FakeTensorMode:
    """Keep no weak references to results of ops: `model.to(dtype)` refuses such parameters."""
    converter = mode.fake_tensor_converter
    memoize = converter.set_tensor_memo
    converter.set_tensor_memo = lambda t, v: None if t.is_meta else memoize(t, v)
    return mode


class _ComputeLinspace(TorchFunctionMode):
    """Computes `linspace`, and its results, with values.

    Models read the rates of stochastic depth off it while they are built.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        valued = tensors and not any(isinstance(x, FakeTensor) for x in tensors)
        with unset_fake_temporarily() if valued or func is torch.linspace else nullcontext():
            return func(*args, **(kwargs or {}))


def _user(where: str, request: Request) -> tuple[Any, ...]:
    """Call a user-defined builder with the request's values that are among its arguments."""
    builder = user_function(where)
    known = set(inspect.signature(builder).parameters)
    values = {"batch": request.batch, "seq": request.seq, "image": request.image}
    result = builder(**{k: v for k, v in values.items() if k in known and v is not None})
    sound = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
    if not sound or not isinstance(([*result, None])[2], Optimizer | None):
        raise TypeError(
            f"model='py:{where}' returned {type(result).__name__}; allowed: (model, batch) or "
            "(model, batch, optimizer)"
        )
    return result


def build_real(request: Request, seed: int, device: str = "cpu") -> Built:
    """Build a model with initial weights, and fill its batch with random data.

    The weights and the batch of a `py:` builder are used as they are.
    """
    torch.manual_seed(seed)
    model, optimizer, batch = build(request, real=True)
    model.to(device)
    batch = tree_map_only(Tensor, lambda x: x.to(device), batch)
    if not request.model.startswith("py:") and isinstance(batch, dict):
        # Classes of an image model, tokens of a text model: the output says how many there are.
        with torch.no_grad():
            classes = model(**batch).logits.shape[-1]
        batch = {name: _random(x, classes) for name, x in batch.items()}
    return model, optimizer, batch


def _random(x: Tensor, classes: int) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, classes)


def _model_from_config_file(path: str) -> NamedModel:
    """Read a transformers config, with the task named in its `architectures`, else its first.

    The path is that of a config.json, or of its folder.
    """
    config = read_config(path)
    known, named = tasks_of(config, TASKS)
    if not known:
        raise ValueError(
            f"model=hf:{path}: no task for {type(config).__name__}; allowed: {', '.join(TASKS)}; "
            "model=py:<module>:<function> takes any model"
        )
    family = NamedModel(
        config=type(config).__name__, task=[*named, *known][0], options=config.to_diff_dict()
    )
    longest = getattr(config, "max_position_embeddings", None) or family.seq
    return replace(family, seq=min(family.seq, longest))


def build_named(family: NamedModel, request: Request) -> tuple[nn.Module, dict[str, Any]]:
    """Build a family's model and batch for a request."""
    transformers = import_transformers("this model")
    from transformers.initialization import no_init_weights

    config = getattr(transformers, family.config)(**family.options)
    prepare_for_training(config, request.dropout)
    batch = _batch(family, config, request)
    chosen = {"attn_implementation": request.attention} if request.attention else {}
    auto = getattr(transformers, f"AutoModelFor{family.task}" if family.task else "AutoModel")
    # Initial values read data, which fake tensors do not have; sizes do not depend on them.
    fake = active_fake_mode() is not None
    with no_init_weights() if fake else nullcontext():
        model = auto.from_config(config, dtype=DTYPES[request.dtype], **chosen)
    model.tie_weights()
    return model, batch


def _batch(family: NamedModel, config: Any, request: Request) -> dict[str, Any]:
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
