"""What an optimizer's states will take, without data: its own first step on tensors of no bytes."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain import optim
from memtrain.compressors import Compressor, Identity, Keep
from memtrain.optim.states.first_step import first_states, twin
from memtrain.optim.states.shards import local
from memtrain.plan.entry import UNKNOWN, Entry

NO_COUNTER = "a counter: not of the parameter's shape"
NO_RULES = "no rule matches"


class StatePlan(Protocol):
    """What is read of a plan."""

    @property
    def config(self) -> Any:
        """Its `Config`."""
        ...

    @property
    def state_rules(self) -> Any:
        """Its rules for states; empty where none are asked for."""
        ...

    def choose_state(self, parameter: str, state: str) -> Compressor | Keep:
        """The compressor for a parameter's state, or the reason to keep it."""
        ...


class _Use(NamedTuple):
    """A parameter, as an optimizer holds it."""

    param: Tensor
    name: str
    group: dict[str, Any]
    plain: dict[str, Tensor]


def predict_states(model: nn.Module, optimizer: Optimizer, plan: StatePlan) -> list[Entry]:
    """List every optimizer state with its bytes, as it is and as the plan keeps it.

    States that exist are read; others are those that the optimizer's own first step makes for a
    parameter on the meta device. What the plan makes of them is told by the optimizer that
    `memtrain.wrap` would build, on the same shapes. Nothing is changed.

    Args:
        model: Names the parameters; real or fake.
        optimizer: Any torch optimizer.
        plan: Chooses by parameter and state.

    Returns:
        One `Entry` of kind `state` per state, `parameter / optimizer / state`. Where bytes cannot
        be told: one entry of 0 bytes whose reason begins with `unknown: `.

    Memory:
        No tensor is allocated besides step counters.

    Example:
        >>> import torch
        >>> from memtrain.plan.plan import make_plan
        >>> model = nn.Linear(128, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> entries = predict_states(model, optimizer, make_plan(model, optimizer, "balanced"))
        >>> [(entry.site, entry.nbytes, entry.planned) for entry in entries][:2]
        [('weight / adamw / step', 4, 4), ('weight / adamw / exp_avg', 32768, 4352)]
    """
    title = type(optimizer).__name__
    names = {p: name for name, p in model.named_parameters()}
    try:
        uses = list(_uses(optimizer, names))
        rows = _planned(optimizer, names, plan) if plan.state_rules else {}
    # Whatever a foreign optimizer's step raises on meta tensors, the rest of the audit stands.
    except Exception as error:  # noqa: BLE001
        why = f"{UNKNOWN}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return [Entry(f"(all parameters) / {title.lower()}", "state", 0, 0, reason=why)]
    entries = []
    for use in uses:
        for state, value in use.plain.items():
            site = f"{use.name} / {title.lower()} / {state}"
            row = rows.get((use.param, state))
            entries.append(_entry(site, value, row, _kept(use, state, value, plan)))
    return entries


def _entry(site: str, value: Tensor, row: optim.StateRow | None, kept: str) -> Entry:
    if row is None:
        return Entry(site, "state", value.nbytes, value.nbytes, reason=kept)
    if isinstance(row.compressor, Identity):
        name = "" if kept else repr(row.compressor)
        return Entry(site, "state", value.nbytes, row.nbytes, name, kept)
    return Entry(site, "state", value.nbytes, row.nbytes, repr(row.compressor), row.reason)


def _kept(use: _Use, state: str, value: Tensor, plan: StatePlan) -> str:
    """Why the state is kept if it is; "" where identity was asked for."""
    if value.shape != local(use.param).shape:
        return NO_COUNTER
    if not plan.state_rules:
        return NO_RULES
    least = plan.config.optim.min_elements
    if use.param.numel() <= least:
        return f"of {least:,} elements or fewer"
    chosen = plan.choose_state(use.name, state)
    return chosen.reason if isinstance(chosen, Keep) else ""


def _uses(optimizer: Optimizer, names: dict[Any, str]) -> Iterator[_Use]:
    """Parameters that get states, with those that plain PyTorch keeps for them."""
    known: dict[tuple[Any, ...], dict[str, Tensor]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            state = optimizer.state.get(param)
            if not state and not param.requires_grad:
                continue
            own = local(param)
            key = (index, tuple(own.shape), param.dtype)
            if not state and key not in known:
                known[key] = _tensors(first_states(optimizer, own, group))
            plain = _tensors(state) if state else known[key]
            yield _Use(param, names.get(param, f"{index}.{number}"), group, plain)


def _planned(
    optimizer: Optimizer, names: dict[Any, str], plan: StatePlan
) -> dict[tuple[Tensor, str], optim.StateRow]:
    def choose(param: Tensor, state: str) -> Compressor:
        chosen = plan.choose_state(names[param], state)
        return Identity() if isinstance(chosen, Keep) else chosen

    least = plan.config.optim.min_elements
    compressed = optim.compress(twin(optimizer), choose, min_elements=least)
    return {(row.param, row.state): row for row in optim.describe(compressed)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter's states that are tensors; of sharded ones this process's part."""
    return {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
