"""Bytes of an optimizer's states, without data: by its own first step on meta tensors."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain import optim
from memtrain.compressors import Compressor, Identity, Keep
from memtrain.optim.states.first_step import first_states, twin
from memtrain.optim.states.layout import check_state
from memtrain.optim.states.shards import local
from memtrain.plan.entry import UNKNOWN, Entry

NO_COUNTER = "a counter: not of the parameter's shape"
NO_RULES = "no rule matches"


def predict_states(
    model: nn.Module,
    optimizer: Optimizer,
    choose: Callable[[str, str], Compressor | Keep] | None,
    *,
    min_elements: int,
) -> list[Entry]:
    """List every optimizer state with its bytes, as it is and as the plan keeps it.

    States that exist are read; others are those that the optimizer's own first step makes for a
    parameter on the meta device. What the plan makes of them is told by the optimizer that
    `memtrain.wrap` would build, on the same shapes. Nothing is changed.

    Args:
        model: Names the parameters; real or fake.
        optimizer: Any torch optimizer.
        choose: The names of a parameter and a state -> what is done to it; None: no rules.
        min_elements: States of parameters with no more are kept.

    Raises:
        ValueError: For a compressor that cannot serve the state that it was chosen for.

    Returns:
        One `Entry` of kind `state` per state, `parameter / optimizer / state`. Where bytes cannot
        be told: one entry of 0 bytes whose reason begins with `unknown: `.

    Memory:
        No tensor is allocated besides step counters.

    Example:
        >>> import torch
        >>> from memtrain.compressors import Block
        >>> model = nn.Linear(128, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> block = lambda parameter, state: Block(bits=4, signed=state == "exp_avg")
        >>> entries = predict_states(model, optimizer, block, min_elements=4096)
        >>> [(entry.site, entry.nbytes, entry.planned) for entry in entries][:2]
        [('weight / adamw / step', 4, 4), ('weight / adamw / exp_avg', 32768, 4352)]
    """
    title = type(optimizer).__name__
    names = {p: name for name, p in model.named_parameters()}
    try:
        plain = list(_plain_states(optimizer, names))
    # Whatever a foreign optimizer's step raises on meta tensors, the rest of the audit stands.
    except Exception as error:  # noqa: BLE001
        return [_unknown(title, error)]
    if choose is not None:
        _check(plain, choose, min_elements)
    try:
        rows = {} if choose is None else _planned(optimizer, names, choose, min_elements)
    except Exception as error:  # noqa: BLE001
        return [_unknown(title, error)]
    entries = []
    for param, name, states in plain:
        for state, value in states.items():
            kept = ""
            if value.shape != local(param).shape:
                kept = NO_COUNTER
            elif choose is None:
                kept = NO_RULES
            elif param.numel() <= min_elements:
                kept = f"of {min_elements:,} elements or fewer"
            elif isinstance(chosen := choose(name, state), Keep):
                kept = chosen.reason
            site = f"{name} / {title.lower()} / {state}"
            entries.append(_entry(site, value, rows.get((param, state)), kept))
    return entries


def _unknown(title: str, error: Exception) -> Entry:
    why = f"{UNKNOWN}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Entry(f"(all parameters) / {title.lower()}", "state", 0, 0, reason=why)


def _check(plain: Iterable[Any], choose: Any, min_elements: int) -> None:
    """Raise for a compressor that cannot serve the state that it was chosen for."""
    for param, name, states in plain:
        for state, value in states.items():
            if param.numel() <= min_elements or value.shape != local(param).shape:
                continue
            if not isinstance(chosen := choose(name, state), Keep):
                check_state(chosen, state)


def _entry(site: str, value: Tensor, row: optim.StateRow | None, kept: str) -> Entry:
    if row is None:
        return Entry(site, "state", value.nbytes, value.nbytes, reason=kept)
    if row.compressor.is_identity:
        name = "" if kept else repr(row.compressor)
        return Entry(site, "state", value.nbytes, row.nbytes, name, kept)
    return Entry(site, "state", value.nbytes, row.nbytes, repr(row.compressor), row.reason)


def _plain_states(
    optimizer: Optimizer, names: dict[Any, str]
) -> Iterator[tuple[Tensor, str, dict[str, Tensor]]]:
    """Parameters that get states, with their names and what plain PyTorch keeps for them."""
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
            yield param, names.get(param, f"{index}.{number}"), plain


def _planned(
    optimizer: Optimizer,
    names: dict[Any, str],
    choose: Callable[[str, str], Compressor | Keep],
    min_elements: int,
) -> dict[tuple[Tensor, str], optim.StateRow]:
    def by_parameter(param: Tensor, state: str) -> Compressor:
        chosen = choose(names[param], state)
        return Identity() if isinstance(chosen, Keep) else chosen

    compressed = optim.compress(twin(optimizer), by_parameter, min_elements=min_elements)
    return {(row.param, row.state): row for row in optim.describe(compressed)}


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter's states that are tensors; of sharded ones this process's part."""
    return {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
