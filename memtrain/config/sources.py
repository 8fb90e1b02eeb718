"""Conversion of all forms of a config to a checked `Config`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.config.errors import check_keys, explain, first_line, nearest
from memtrain.config.schema import (
    CPU,
    GRADIENTS,
    KEEP,
    WEIGHTS,
    ActivationRule,
    Activations,
    Config,
    Optim,
    Release,
    StateRule,
)

__all__ = [
    "CPU",
    "GRADIENTS",
    "KEEP",
    "PLAN_KEY",
    "PLAN_VERSION",
    "WEIGHTS",
    "ActivationRule",
    "Activations",
    "Config",
    "Optim",
    "Release",
    "StateRule",
    "check_keys",
    "compose",
    "from_mapping",
    "load",
    "nearest",
    "options",
]

PLAN_KEY, PLAN_VERSION = "memtrain_plan", 1
"""First key of a plan file, and its value."""
_COMPRESSORS = ("compressor", "recompute_inputs")
"""Keys whose values are compressors."""
_NAMED = re.compile(r"\s*\{(.*,)?\s*name\s*:", re.DOTALL)


def load(cfg: "str | Path | Sequence[str] | Mapping[str, Any] | Config | None") -> Config:
    """Convert any form of a config to a `Config`.

    Args:
        cfg: A preset's name (`"balanced"` if None), the path of a YAML file, a list of Hydra
            overrides, a dict or a DictConfig (with changes to its `preset`), or a `Config`. A plan
            (a file or a mapping with the key `memtrain_plan`) is complete and has no preset.

    Returns:
        The validated config.

    Raises:
        ValueError: For an unknown preset or key, with the nearest valid one, or a value out of
            range.
        TypeError: For a value of the wrong type.
        FileNotFoundError: For a YAML path that does not exist.

    Example:
        >>> load({"preset": "balanced", "seed": 3}).seed
        3
    """
    if isinstance(cfg, Config):
        return cfg
    if cfg is None:
        return from_mapping(compose([]))
    if isinstance(cfg, Path) or (isinstance(cfg, str) and cfg.endswith((".yaml", ".yml"))):
        return _load_file(Path(cfg))
    if isinstance(cfg, str):
        return from_mapping(compose([f"preset={cfg}"]))
    if isinstance(cfg, DictConfig):
        return _merge_over_preset(cfg)
    if isinstance(cfg, Mapping):
        return _merge_over_preset(OmegaConf.create(dict(cfg)))
    if isinstance(cfg, Sequence | ListConfig):
        overrides = [str(item) for item in cfg]
        for item in overrides:
            if "=" not in item and not item.startswith("~"):
                hint = f"did you mean 'preset={item}'? " if item in options("preset") else ""
                raise ValueError(f"override {item!r} has no '='; {hint}allowed: key=value")
        composed = compose(overrides)
        check_keys(composed, Config)  # `+key=value` adds any key
        return from_mapping(composed)
    raise TypeError(
        f"cfg is a {type(cfg).__name__}; allowed: a preset's name, a YAML path, a list of "
        "overrides, a dict, a DictConfig, a Config, a Plan"
    )


def _load_file(path: Path) -> Config:
    """Load a config or a plan from a YAML file; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"config file {str(path)!r} does not exist")
    try:
        return _merge_over_preset(OmegaConf.load(path))
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line if error.problem_mark else 0) + 1
        raise ValueError(f"{str(path)!r}, line {line}: {error.problem}") from error
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {str(error).splitlines()[0]}") from error
    except TypeError as error:
        raise TypeError(f"{str(path)!r}: {error}") from error


def compose(overrides: Sequence[str], name: str = "config") -> DictConfig:
    """Compose a primary config of `memtrain/configs` with Hydra, without writing files.

    Args:
        overrides: Hydra overrides: `"preset=smallest"`, `"activations.min_elements=2048"`.
        name: The primary config: `"config"` or `"train"`.

    Returns:
        The composed config, with its schema's types attached.

    Raises:
        ValueError: For an unknown key or group option, with the nearest valid one.

    Example:
        >>> compose(["preset=exact"]).activations.rules[0].compressor
        'identity'
    """
    # Importing memtrain must not import Hydra.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    ConfigStore.instance().store(name="schema", node=Config)
    clear = GlobalHydra.instance()
    outer, clear.hydra = clear.hydra, None  # a user's own @hydra.main keeps its state
    try:
        with initialize_config_module("memtrain.configs", version_base="1.3"):
            return hydra_compose(name, overrides=_replace_named_compressors(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        groups = [item for item in overrides if options(item.partition("=")[0])]
        if groups == [*overrides]:  # one of them does not fit the schema
            groups = []
        raise explain(error, overrides, options, lambda: compose(groups, name)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def from_mapping(cfg: DictConfig) -> Config:
    """Validate memtrain's own keys of a composed config.

    Args:
        cfg: A composed config; unknown keys (an experiment's) are ignored.

    Returns:
        The validated config.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """
    names = {item.name for item in dataclasses.fields(Config)}
    known = OmegaConf.create({key: cfg[key] for key in cfg if key in names})
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), known)
    except OmegaConfBaseException as error:
        raise TypeError(first_line(error)) from error
    return cast("Config", OmegaConf.to_object(merged))


def options(group: str) -> list[str]:
    """Return the names of a config group's files, such as those of `preset`."""
    return sorted(
        path.stem for path in (Path(__file__).parents[1] / "configs" / group).glob("*.yaml")
    )


def _merge_over_preset(changes: Any) -> Config:
    """Merge a config's keys over its preset, or a plan's keys over the schema's defaults."""
    if not isinstance(changes, DictConfig):
        raise TypeError(f"a config is a mapping of keys, not {type(changes).__name__}")
    is_plan = PLAN_KEY in changes
    if is_plan and changes[PLAN_KEY] != PLAN_VERSION:
        raise ValueError(f"{PLAN_KEY}={changes[PLAN_KEY]!r}; allowed: {PLAN_VERSION}")
    special = PLAN_KEY if is_plan else "preset"
    general = OmegaConf.create({key: changes[key] for key in changes if key != special})
    check_keys(general, Config)
    if is_plan:
        base = OmegaConf.structured(Config)
    else:
        base = compose([f"preset={changes.get('preset') or 'balanced'}"])
    path = "activations.recompute_inputs"  # rules are replaced as lists
    if "name" in (OmegaConf.select(general, path) or ()):
        OmegaConf.update(base, path, None)
    try:
        return from_mapping(OmegaConf.merge(base, general))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise TypeError(first_line(error)) from error


def _replace_named_compressors(overrides: Sequence[str]) -> list[str]:
    """Return overrides in which a named compressor replaces the preset's.

    Hydra merges mappings and would keep the fields of the preset's compressor. Null is not merged.
    """
    found: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.rpartition(".")[2] in _COMPRESSORS and _NAMED.match(value):
            found.append(f"{key}=null")
        found.append(override)
    return found
