"""Entries of a plan: bytes of weights, gradients, states and saved tensors."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memtrain import optim
from memtrain.activations.saved.site import Record, Site
from memtrain.compressors import Compressor, Identity, Keep
from memtrain.optim.fused.payloads import counter_dtype
from memtrain.optim.states.compressed import refuse
from memtrain.optim.states.compressed_states import on_each
from memtrain.optim.states.first_step import first_shapes, first_states, without_states
from memtrain.optim.states.layout import COMPLEX, check_state
from memtrain.optim.states.optimizer_hooks import innermost
from memtrain.optim.states.shards import local
from memtrain.optim.wrappers.accumulate import BUFFER, sum_bytes
from memtrain.optim.wrappers.apply import CPU, KEEP, RELEASE
from memtrain.optim.wrappers.weights import keeps_float32, parse

UNKNOWN = "unknown: "
"""Prefix of the reason of an entry whose bytes are unknown before the run."""


@dataclass(frozen=True)
class PlanEntry:
    """The bytes of a site, and its compressor or the reason to keep it."""

    site: str
    kind: str
    """`activation`, `state`, `weight` or `gradient`."""
    nbytes: int
    """Bytes without memtrain."""
    planned: int
    """Bytes with the plan."""
    compressor: str = ""
    """Empty if the site is kept."""
    reason: str = ""
    """Why the site is kept, or a note."""
    host: int = 0
    """Further bytes in host memory with the plan; 0 unless `optim.device=cpu`."""

    def on_device(self, separate: bool) -> int:
        """Return the planned bytes on the device, and the host's unless memory is `separate`."""
        return self.planned if separate else self.planned + self.host

    @property
    def comment(self) -> str:
        """Return the bytes and the reason as text.

        Example:
            >>> PlanEntry("h.0 / gelu / input", "activation", 4096, 544, "Group()").comment
            '4,096 B -> 544 B'
        """
        kept = self.nbytes == self.planned
        sides = f"{self.planned:,} B" if kept else f"{self.nbytes:,} B -> {self.planned:,} B"
        if self.host:
            sides += f", {self.host:,} B on the host"
        return f"{sides}; {self.reason}" if self.reason else sides


def merge_records(records: Iterable[Record]) -> Iterator[PlanEntry]:
    """Yield one entry of kind `activation` per site, with the sums over its records."""
    sites: dict[Site, list[Record]] = {}
    for record in records:
        sites.setdefault(record.site, []).append(record)
    for site, rows in sites.items():
        shown = next((row for row in rows if row.compressor), rows[0])
        nbytes, planned = sum(row.nbytes for row in rows), sum(row.planned for row in rows)
        reason = _kept_share(rows, planned) if shown.compressor else shown.reason
        yield PlanEntry(site.name, "activation", nbytes, planned, shown.compressor, reason)


def _kept_share(rows: list[Record], planned: int) -> str:
    """Return why a compressed site has uncompressed tensors, if they are most of the bytes."""
    kept = [row for row in rows if not row.compressor]
    size = sum(row.planned for row in kept)
    if 2 * size <= planned:
        return ""
    return f"{size:,} B kept: {max(kept, key=lambda row: row.planned).reason}"


NOT_REQUESTED = "not requested"
NOT_TRAINED = "not the optimizer's: no correction"
WORKSPACE = "(the largest gradient, while it is applied)"
BUCKETS = "(buckets of DistributedDataParallel)"


def predict_weights(
    model: nn.Module, optimizers: Sequence[Optimizer], config: Any
) -> list[PlanEntry]:
    """Return one entry per parameter: its bytes now, and under `config.weights`.

    The planned bytes include corrections. Sharded parameters count with this process's part.
    """
    dtypes, trained = training_dtypes(model, config), parameters_in_groups(optimizers)
    kept = keeps_float32(model)
    entries = []
    for name, p in model.named_parameters():
        compressor, planned = "", local(p).nbytes
        if config.weights == KEEP:
            reason = NOT_REQUESTED
        elif p not in dtypes:
            reason = kept.get(p, f"kept: {p.dtype}")
        else:
            compressor, reason = config.weights, "" if p in trained else NOT_TRAINED
            size = parse(config.weights).nbytes if p in trained else dtypes[p].itemsize
            planned = local(p).numel() * size
        host = 0
        if config.optim.device == CPU and p in trained:  # the device has a copy
            host, planned = planned, local(p).numel() * dtypes.get(p, p.dtype).itemsize
        nbytes = local(p).nbytes
        entries.append(PlanEntry(name, "weight", nbytes, planned, compressor, reason, host))
    return entries


def predict_gradients(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], config: Any
) -> list[PlanEntry]:
    """Return one entry per trained parameter, and one for the workspace of released gradients.

    A gradient has its weight's dtype. Under DistributedDataParallel gradients stay in their
    buckets, which have an entry if they are a second copy (`gradient_as_bucket_view=False`).
    """
    dtypes = training_dtypes(model, config)
    trained = parameters_in_groups([optimizer] if isinstance(optimizer, Optimizer) else optimizer)
    parallel = isinstance(model, DistributedDataParallel)
    entries, largest = [], 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        compressor, planned = "", local(p).numel() * dtypes.get(p, p.dtype).itemsize
        host, full_bytes = 0, planned
        if config.gradients != RELEASE or p not in trained:
            smaller = planned < local(p).nbytes
            compressor = config.weights if smaller else ""
            reason = "in its weight's dtype" if smaller else NOT_REQUESTED
        else:
            largest = max(largest, planned)
            planned, compressor, reason = _released(p, config.release.accumulate)
        if config.optim.device == CPU and p in trained:
            if config.gradients != RELEASE:
                host = full_bytes  # in `step()`
            elif config.release.clip == "global_norm":
                host = 4 * local(p).numel() if planned else full_bytes
            else:
                host = planned
            planned = 0 if config.gradients == RELEASE else planned
        nbytes = local(p).nbytes
        entries.append(PlanEntry(name, "gradient", nbytes, planned, compressor, reason, host))
    if largest:
        entries.append(PlanEntry(WORKSPACE, "gradient", 0, largest, RELEASE, "workspace"))
    if parallel and not model.gradient_as_bucket_view:
        total = sum(local(p).nbytes for p in model.parameters() if p.requires_grad)
        reason = "a second copy: gradient_as_bucket_view=True spares it"
        entries.append(PlanEntry(BUCKETS, "gradient", total, total, reason=reason))
    return entries


def _released(param: Tensor, passes: int) -> tuple[int, str, str]:
    """Return the bytes, the compressor and the note of a released gradient."""
    if passes == 1:
        return 0, RELEASE, ""
    return sum_bytes(param), repr(BUFFER), f"the sum of up to {passes - 1} backward passes"


def parameters_in_groups(optimizers: Iterable[Optimizer]) -> set[Tensor]:
    """Return the parameters in the groups of optimizers."""
    return {p for one in optimizers for group in one.param_groups for p in group["params"]}


def training_dtypes(model: nn.Module, config: Any) -> dict[Tensor, torch.dtype]:
    """Map the parameters stored in two bytes to their dtype in the forward."""
    if config.weights == KEEP:
        return {}
    low, kept = parse(config.weights).dtype, keeps_float32(model)
    fits = (torch.float32, low)
    return {p: low for p in model.parameters() if p not in kept and p.dtype in fits}


NO_COUNTER = "a counter: not of the parameter's shape"
NO_RULES = "no rule matches"


def predict_states(
    model: nn.Module,
    optimizer: Optimizer,
    choose: Callable[[str, str], Compressor | Keep] | None,
    *,
    min_elements: int,
    masters: Collection[Tensor] = (),
) -> list[PlanEntry]:
    """Return the bytes of every optimizer state, without memtrain and with the plan.

    Existing states are read. Others are those of the optimizer's own first step for a parameter on
    the meta device. The optimizer that `memtrain.wrap` would build reports the planned bytes for
    the same shapes. Nothing is changed.

    Tensors of the model may be fake. `choose` decides by the names of a parameter and a state; None
    stands for no rules. States of parameters with at most `min_elements` elements are kept; kept
    states of `masters`, which are stepped in float32, are float32 too.

    A site is `parameter / optimizer / state`. Entries with unknown bytes have 0 bytes and a reason
    that begins with `unknown: `.
    """
    title = type(optimizer).__name__
    names = {p: name for name, p in model.named_parameters()}
    inner = innermost(optimizer)
    if isinstance(inner, optim.CompressedStates):
        if choose is not None:
            refuse(inner)
        return [*_compressed_states(inner, names)]
    try:
        plain = list(_torch_states(optimizer, names))
        stepped = {param: states for param, _, states in _torch_states(optimizer, names, masters)}
    # Any optimizer may raise on meta tensors; the audit then reports other parts.
    except Exception as error:  # noqa: BLE001
        return [_unknown_states(title, error)]
    if choose is not None:
        _check_compressors(plain, choose, min_elements)
    try:
        rows = {} if choose is None else _compressed_rows(optimizer, names, choose, min_elements)
    except Exception as error:  # noqa: BLE001
        return [_unknown_states(title, error)]
    entries = []
    for param, name, states in plain:
        for state, value in states.items():
            kept = _keep_reason(param, value, min_elements, choose)
            if not kept and choose is not None and isinstance(chosen := choose(name, state), Keep):
                kept = chosen.reason
            site = f"{name} / {title.lower()} / {state}"
            row, size = rows.get((param, state)), stepped[param][state].nbytes
            entries.append(_state_entry(site, value.nbytes, size, row, kept))
    return entries


def _compressed_states(
    optimizer: optim.CompressedStates, names: dict[Any, str]
) -> Iterator[PlanEntry]:
    """Yield entries of the states that an optimizer compresses itself, and of its counters."""
    title = type(optimizer).__name__.lower()
    rows: defaultdict[Tensor, list[optim.StateRow]] = defaultdict(list)
    for row in optim.describe(optimizer):
        rows[row.param].append(row)
    for param, group, number in on_each(optimizer.param_groups):
        state = optimizer.state.get(param, {})
        if not state and not param.requires_grad:
            continue
        site = f"{names.get(param, number)} / {title} / "
        if "step" in (state or _first_names(optimizer, param, group)):
            nbytes = getattr(state.get("step"), "nbytes", counter_dtype().itemsize)
            yield PlanEntry(f"{site}step", "state", nbytes, nbytes, reason=NO_COUNTER)
        for row in rows[param]:
            reason = row.reason.removeprefix("kept: ") or f"its optimizer's: {row.compressor!r}"
            yield PlanEntry(site + row.state, "state", row.nbytes, row.nbytes, reason=reason)


def _first_names(
    optimizer: optim.CompressedStates, param: Tensor, group: dict[str, Any]
) -> Collection[str]:
    """Return the names of the tensors that the first step creates."""
    if isinstance(optimizer, optim.FusedStates):
        return (*optimizer.names, "step") if optimizer.counts else optimizer.names
    return first_shapes(optimizer.original, param, group) if optimizer.original else ()


def _keep_reason(param: Tensor, value: Tensor, min_elements: int, choose: Any) -> str:
    """Return why a state is kept regardless of the rules; "" if the rules decide."""
    if value.shape != local(param).shape:
        return NO_COUNTER
    if choose is None:
        return NO_RULES
    if param.is_complex():
        return COMPLEX
    return f"of {min_elements:,} elements or fewer" if param.numel() <= min_elements else ""


def _unknown_states(title: str, error: Exception) -> PlanEntry:
    reason = f"{UNKNOWN}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return PlanEntry(f"(all parameters) / {title.lower()}", "state", 0, 0, reason=reason)


def _check_compressors(plain: Iterable[Any], choose: Any, min_elements: int) -> None:
    """Raise for a compressor that cannot serve the state it was chosen for."""
    for param, name, states in plain:
        for state, value in states.items():
            if param.numel() <= min_elements or value.shape != local(param).shape:
                continue
            if not isinstance(chosen := choose(name, state), Keep):
                check_state(chosen, state)


def _state_entry(
    site: str, nbytes: int, size: int, row: optim.StateRow | None, kept: str
) -> PlanEntry:
    if row is None:
        return PlanEntry(site, "state", nbytes, size, reason=kept)
    if row.compressor.is_identity:
        # A fused step keeps the state in float32, others in the dtype of the stepped parameter.
        name = "" if kept else repr(row.compressor)
        return PlanEntry(site, "state", nbytes, max(row.nbytes, size), name, kept)
    return PlanEntry(site, "state", nbytes, row.nbytes, repr(row.compressor), row.reason)


def _torch_states(
    optimizer: Optimizer, names: dict[Any, str], masters: Collection[Tensor] = ()
) -> Iterator[tuple[Tensor, str, dict[str, Tensor]]]:
    """Yield parameters with states, their names, and their states in unmodified PyTorch.

    Parameters in `masters` have float32 states.
    """
    known: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            state = optimizer.state.get(param)
            if not state and not param.requires_grad:
                continue
            shard = local(param)
            if param in masters:
                shard = torch.empty(shard.shape, dtype=torch.float32, device="meta")
            key = (index, tuple(shard.shape), shard.dtype)
            if not state and key not in known:
                known[key] = _tensors(first_states(optimizer, shard, group))
            plain = _tensors(state) if state else known[key]
            yield param, names.get(param, f"{index}.{number}"), plain


def _compressed_rows(
    optimizer: Optimizer,
    names: dict[Any, str],
    choose: Callable[[str, str], Compressor | Keep],
    min_elements: int,
) -> dict[tuple[Tensor, str], optim.StateRow]:
    def by_parameter(param: Tensor, state: str) -> Compressor:
        chosen = choose(names[param], state)
        return Identity() if isinstance(chosen, Keep) else chosen

    compressed = optim.compress(without_states(optimizer), by_parameter, min_elements=min_elements)
    return {(row.param, row.state): row for row in optim.describe(compressed)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a parameter's tensor states, of sharded ones this process's part."""
    return {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
