"""torchtitan: optimizers that are wrapped together with the parts of the model."""

from dataclasses import fields, make_dataclass
from typing import Any

import memtrain
from memtrain.optim.states.checkpoint_options import CORRECTION


def memtrain_optimizers(config: Any, cfg: Any = None) -> Any:
    """Return a config whose optimizers are wrapped, with the model, when torchtitan builds them.

    torchtitan builds them after sharding the model, so no model converter is needed. Checkpoints
    contain payloads, corrections and counters, and resume bit for bit.

    Args:
        config: An `OptimizersContainer.Config`, such as `default_adamw(lr=3e-4)`: of one class of
            optimizer.
        cfg: Anything that `memtrain.wrap` takes.

    Returns:
        A config for the trainer's `optimizer`. Building it raises ValueError where a part of the
        model has several optimizers, and as `memtrain.wrap` does.

    Raises:
        ImportError: If torchtitan is not installed.
    """
    from torchtitan.components.optimizer import (  # pyright: ignore[reportMissingImports]
        OptimizersContainer,
    )

    extended = make_dataclass(
        "Config",
        [("memtrain", Any, None)],
        bases=(OptimizersContainer.Config,),
        kw_only=True,
        slots=True,
    )
    bases = (_WrappingContainer, OptimizersContainer)
    container: Any = type("MemtrainOptimizers", bases, {"Config": extended})
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return container.Config(**values, memtrain=cfg)


class _WrappingContainer:
    """Before `OptimizersContainer` among the bases of a class."""

    optimizers: list[Any]

    def __init__(self, config: Any, *, model_parts: list[Any]) -> None:
        super().__init__(config, model_parts=model_parts)  # pyright: ignore[reportCallIssue]
        if len(self.optimizers) != len(model_parts):
            kinds = sorted({type(optimizer).__name__ for optimizer in self.optimizers})
            raise ValueError(f"optimizers {', '.join(kinds)} of one model; allowed: one of them")
        pairs = zip(model_parts, self.optimizers, strict=True)
        self.optimizers = [
            memtrain.wrap(part, optimizer, config.memtrain)[1] for part, optimizer in pairs
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, also the parts that are in no optimizer's `state`."""
        # Tensors loaded in place may be the live corrections, which a written weight discards.
        state_dict = {
            key: value.clone() if key.endswith(CORRECTION) else value
            for key, value in state_dict.items()
        }
        self.state_dict()  # creates missing states  # pyright: ignore
        for optimizer in self.optimizers:
            optimizer.load_state_dict(_nested(optimizer.state_dict(), state_dict))


def _nested(target: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """Nest torchtitan's keys `state.<parameter>.<state>` like the checkpoint `target`."""
    names = dict(
        pair
        for group in target["param_groups"]
        for pair in zip(group["params"], group["param_names"], strict=True)
    )
    groups = []
    for group in target["param_groups"]:
        first = group["param_names"][0]
        kept = ("params", "param_names")
        options = {key: flat[f"param_groups.{first}.{key}"] for key in group if key not in kept}
        groups.append({**group, **options})
    states = {
        number: _filled(state, f"state.{names[number]}", flat)
        for number, state in target["state"].items()
    }
    return {**target, "state": states, "param_groups": groups}


def _filled(states: dict[str, Any], prefix: str, flat: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in states.items():
        name = f"{prefix}.{key}"
        found[key] = _filled(value, name, flat) if isinstance(value, dict) else flat[name]
    return found
