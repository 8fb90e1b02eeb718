"""What is done to weights and gradients: their planned bytes, and how `wrap` applies it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memtrain.compressors import Compressor, Keep
from memtrain.compressors.base import GRADIENT_SUM
from memtrain.compressors.registry import check_seat
from memtrain.optim.states.shards import local
from memtrain.optim.wrappers.accumulate import sum_bytes
from memtrain.optim.wrappers.around import Link
from memtrain.optim.wrappers.release import ReleaseGradients
from memtrain.optim.wrappers.release_hooks import FollowDDP
from memtrain.optim.wrappers.weight_formats import CastInputs, keeps_float32, parse
from memtrain.optim.wrappers.weights import SplitWeights, check_unsharded
from memtrain.plan.build import build
from memtrain.plan.entry import Entry

ATTRIBUTE = "_memtrain"
"""Where `wrap` leaves on the model what it did."""
KEEP, RELEASE = "keep", "release"
NOT_REQUESTED = "not requested"
NOT_HELD = "not the optimizer's: no correction"
WORKSPACE = "(the largest gradient, while it is applied)"
BUCKETS = "(buckets of DistributedDataParallel)"
IN_BUCKETS = "kept: its bucket holds it until step()"


class Asked(Protocol):
    """What is read of a config."""

    weights: str
    gradients: str
    release: Any
    seed: int


@dataclass
class Applied:
    """What `apply` did, and where."""

    optimizer: Optimizer
    weights: Link[SplitWeights] = field(default_factory=lambda: Link[SplitWeights]())
    handles: list[Any] = field(default_factory=list)


def predict_weights(model: nn.Module, optimizer: Optimizer, config: Asked) -> list[Entry]:
    """One entry per parameter: its bytes now, and as `config.weights` keeps it.

    Args:
        model: Real or fake.
        optimizer: Its optimizer.
        config: `weights` is read.

    Returns:
        Entries of kind `weight`, corrections among the planned bytes; of sharded parameters this
        process's part, here and in `predict_gradients`.
    """
    dtypes, held = training_dtypes(model, config), _held(optimizer)
    kept = keeps_float32(model)
    entries = []
    for name, p in model.named_parameters():
        if config.weights == KEEP:
            entries.append(
                Entry(name, "weight", local(p).nbytes, local(p).nbytes, reason=NOT_REQUESTED)
            )
        elif p not in dtypes:
            why = kept.get(p, f"kept: {p.dtype}")
            entries.append(Entry(name, "weight", local(p).nbytes, local(p).nbytes, reason=why))
        else:
            size = parse(config.weights).nbytes if p in held else dtypes[p].itemsize
            why = "" if p in held else NOT_HELD
            planned = local(p).numel() * size
            entries.append(Entry(name, "weight", local(p).nbytes, planned, config.weights, why))
    return entries


def predict_gradients(model: nn.Module, optimizer: Optimizer, config: Asked) -> list[Entry]:
    """One entry per trained parameter, and the workspace of released ones.

    Args:
        model: Real or fake.
        optimizer: Its optimizer.
        config: `weights` (a gradient has its weight's dtype), `gradients`,
            `release.accumulate` and `release.sums` are read.

    Returns:
        Entries of kind `gradient`. Of a DistributedDataParallel gradients stay, in buckets that are
        listed where they are a second copy (`gradient_as_bucket_view=False`); one that is put
        around the model later is not known here.
    """
    dtypes, held = training_dtypes(model, config), _held(optimizer)
    parallel = isinstance(model, DistributedDataParallel)
    sums = sum_compressor(config)
    entries, largest = [], 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        planned = local(p).numel() * dtypes.get(p, p.dtype).itemsize
        if config.gradients == RELEASE and p in held and parallel:
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, reason=IN_BUCKETS))
        elif config.gradients == RELEASE and p in held:
            largest = max(largest, planned)
            entries.append(_released(name, p, config.release.accumulate, sums))
        elif planned < local(p).nbytes:
            why = "in its weight's dtype"
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, config.weights, why))
        else:
            entries.append(Entry(name, "gradient", local(p).nbytes, planned, reason=NOT_REQUESTED))
    if largest:
        entries.append(Entry(WORKSPACE, "gradient", 0, largest, RELEASE, "workspace"))
    if parallel and not model.gradient_as_bucket_view:
        total = sum(local(p).nbytes for p in model.parameters() if p.requires_grad)
        why = "a second copy: gradient_as_bucket_view=True spares it"
        entries.append(Entry(BUCKETS, "gradient", total, total, reason=why))
    return entries


def sum_compressor(config: Asked) -> Compressor:
    """The compressor of gradients that wait for the last of several backward passes.

    Raises:
        ValueError: For one that cannot hold them: `release.sums` is named.
    """
    asked = config.release.sums
    built = build(asked)
    if isinstance(built, Keep):
        raise ValueError(f"release.sums={asked!r}; allowed: a compressor, such as identity")
    check_seat(built, GRADIENT_SUM, f"release.sums={asked!r}")
    return built


def _released(name: str, param: Tensor, passes: int, sums: Compressor) -> Entry:
    if passes == 1:
        return Entry(name, "gradient", local(param).nbytes, 0, RELEASE)
    why = f"the sum of up to {passes - 1} backward passes"
    return Entry(name, "gradient", local(param).nbytes, sum_bytes(param, sums), repr(sums), why)


def training_dtypes(model: nn.Module, config: Asked) -> dict[Tensor, torch.dtype]:
    """Parameters that are kept in two bytes, with their dtype in the forward.

    Example:
        >>> from memtrain.config.sources import Config
        >>> [*training_dtypes(nn.Linear(1, 1), Config(weights="bf16+8")).values()]
        [torch.bfloat16, torch.bfloat16]
    """
    if config.weights == KEEP:
        return {}
    low, kept = parse(config.weights).dtype, keeps_float32(model)
    fits = (torch.float32, low)
    return {p: low for p in model.parameters() if p not in kept and p.dtype in fits}


def check(model: nn.Module, config: Asked) -> None:
    """Raise ValueError for what `apply` could not do; nothing is changed."""
    if config.weights == KEEP:
        return
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"weights={config.weights!r} with a DistributedDataParallel: its buckets have the "
            "weights' dtype already. Wrap the model first, then put DistributedDataParallel around"
        )
    check_unsharded(model.parameters())


def apply(model: nn.Module, optimizer: Optimizer, config: Asked) -> Applied:
    """Convert the weights, and put what the config asks for around the optimizer.

    Args:
        model: Its parameters are converted in place.
        optimizer: Plain, or with compressed states.
        config: Of the plan.

    Returns:
        The optimizer to use, and what `remove` takes back.
    """
    applied = Applied(optimizer)
    if config.weights != KEEP:
        held = _held(optimizer)
        frozen = [p for p in model.parameters() if p not in held]
        keep, seed = keeps_float32(model), config.seed
        split = SplitWeights(optimizer, config.weights, seed=seed, keep=keep, frozen=frozen)
        applied.optimizer, applied.weights = split, Link(split)
        cast = CastInputs(split.format.dtype)
        # After the interception's own hook: the copies are not the user's to keep alive.
        handle = model.register_forward_pre_hook(cast, with_kwargs=True)
        applied.handles.append(handle)
    if config.gradients == RELEASE:
        own = config.release
        release = ReleaseGradients(
            applied.optimizer,
            clip=own.clip,
            limit=own.limit,
            loss_scale=own.loss_scale,
            skip_nonfinite=own.skip_nonfinite,
            accumulate=own.accumulate,
            sums=sum_compressor(config),
            seed=config.seed,
        )
        applied.optimizer = release
        if isinstance(model, DistributedDataParallel):
            release.follow(model)
        else:
            applied.handles.append(model.register_forward_pre_hook(FollowDDP(release)))
    return applied


def check_removable(optimizer: Optimizer, config: Asked) -> None:
    """Raise ValueError unless this is the optimizer that `apply` gave."""
    expected = {RELEASE: ReleaseGradients}.get(config.gradients)
    if expected is None and config.weights != KEEP:
        expected = SplitWeights
    if expected is not None and not isinstance(optimizer, expected):
        given = type(optimizer).__name__
        raise ValueError(f"unwrap needs the optimizer that wrap returned, not a plain {given}")


def remove(optimizer: Optimizer, handles: list[Any]) -> Optimizer:
    """Take back what `apply` did.

    Args:
        optimizer: What `apply` gave.
        handles: Of its hooks on the model.

    Returns:
        The optimizer that was given to `apply`; the weights are float32 again if they were.
    """
    for handle in handles:
        handle.remove()
    if isinstance(optimizer, ReleaseGradients):
        optimizer = optimizer.detach()
    if isinstance(optimizer, SplitWeights):
        optimizer = optimizer.restore()
    return optimizer


def fp32_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's `state_dict` in float32: of split weights the masters, to export or evaluate.

    Args:
        model: A model that `wrap` returned, with its optimizer alive.

    Returns:
        The keys of `model.state_dict()`; parameters float32, buffers as they are.

    Raises:
        ValueError: If the model is not wrapped, or its optimizer is gone.

    Example:
        >>> import memtrain
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> torch.nn.init.constant_(model.weight, 0.1)
        Parameter containing: tensor([[0.1000]], requires_grad=True)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model, optimizer = memtrain.wrap(model, optimizer, {"weights": "bf16+16"})
        >>> model.weight.item(), fp32_state_dict(model)["weight"].item()
        (0.10009765625, 0.10000000149011612)
    """
    split, found = _split(model), {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            found[name] = split.master(value) if split else value.detach().float()
        else:
            found[name] = value.detach() if isinstance(value, Tensor) else value
    return found


def load_fp32_state_dict(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load a float32 `state_dict` into a model whose weights may be split.

    Args:
        model: A model that `wrap` returned, with its optimizer alive.
        state_dict: What `fp32_state_dict`, or the plain model's `state_dict`, returned.

    Raises:
        ValueError: If the model is not wrapped, or keys or shapes differ; nothing was changed then.
    """
    split = _split(model)
    own = model.state_dict(keep_vars=True)
    if own.keys() != state_dict.keys():
        wrong = sorted(own.keys() ^ state_dict.keys())[:5]
        raise ValueError(f"the state dict's keys differ from the model's: {', '.join(wrong)} ...")
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape != state_dict[name].shape:
            shapes = f"{tuple(state_dict[name].shape)}, not {tuple(value.shape)}"
            raise ValueError(f"{name} has shape {shapes}")
    model.load_state_dict(dict(state_dict))
    for name, value in own.items():
        if split is not None and isinstance(value, nn.Parameter):
            split.set_master(value, state_dict[name])


def _split(model: nn.Module) -> Any:
    wrapped = getattr(model, ATTRIBUTE, None)
    if wrapped is None:
        raise ValueError(f"this {type(model).__name__} is not wrapped by memtrain")
    split = wrapped.weights()
    if split is None and wrapped.plan.config.weights != KEEP:
        raise ValueError(
            "the optimizer that memtrain.wrap returned with this model holds its weights' lower "
            "bits, and is gone (or this is a copy of the model)"
        )
    return split


def _held(optimizer: Optimizer) -> set[Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"]}
