"""Plans as YAML files: what a person can edit, diff, commit, and give to `wrap`."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import Config, check_keys, from_mapping
from memtrain.config.sources import load as load_config
from memtrain.plan.build import build, spec

HEADER, VERSION = "memtrain_plan", 1
_TITLE = f"""\
# A memtrain plan: memtrain.wrap(model, optimizer, "this_file.yaml"). Sites come before rules; the
# comments are for people, and nothing reads them.
{HEADER}: {VERSION}
"""
_PARTS = ("activations", "optim")
_Line = tuple[str, Compressor | Keep, str]  # a site, what is done to it, and a comment


def load(cfg: Any) -> Config:
    """Make a `Config` of a plan file, or of anything else that `memtrain.config.load` takes.

    Args:
        cfg: The path of a YAML file whose first key is `memtrain_plan` (`str` or `Path`); or
            another form of config.

    Returns:
        The validated config. A plan file's is complete: no preset is behind it.

    Raises:
        ValueError: For a plan of another version, or a corrupt one: the message has the line.
        FileNotFoundError: For a path that does not exist.
        TypeError: As `memtrain.config.load`.

    Example:
        >>> load("exact").activations.rules[0].compressor
        'identity'
    """
    if isinstance(cfg, Path) or (isinstance(cfg, str) and cfg.endswith((".yaml", ".yml"))):
        path = Path(cfg)
        if path.is_file() and _is_plan(text := _text(path)):
            return loads(text, str(path))
    return load_config(cfg)


def loads(text: str, name: str = "plan") -> Config:
    r"""Read a plan from its text.

    Args:
        text: What `Plan.to_yaml` gave, edited or not.
        name: For messages: the file's.

    Returns:
        The config that stands for the plan.

    Raises:
        ValueError: If it is not a plan of this version, or for the first mistake in it, with its
            line.

    Example:
        >>> loads("memtrain_plan: 1\nseed: x")
        Traceback (most recent call last):
        ...
        ValueError: plan, line 2: seed: Value 'x' of type 'str' could not be converted to Integer
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line if error.problem_mark else 0) + 1
        raise ValueError(f"{name}, line {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or HEADER not in values:
        raise ValueError(f"{name} is not a plan: its key '{HEADER}' is missing")
    lines: dict[tuple[str, ...], int] = {}
    for path, line in _lines(root):
        if path in lines:
            raise ValueError(f"{name}, line {line}: {path[-1]!r} stands in line {lines[path]} too")
        lines[path] = line
    version = values.pop(HEADER)
    if version != VERSION:
        where = f"{name}, line {lines[(HEADER,)]}"
        raise ValueError(f"{where}: {HEADER}={version!r}; allowed: {VERSION}")
    return _checked(values, lines, name)


def dumps(config: Config, sites: Mapping[str, Iterable[_Line]]) -> str:
    """Write a plan.

    Args:
        config: Its config; the sites in it are replaced.
        sites: `activations` and `optim` -> each of their sites, what is done to it, and a comment.

    Returns:
        YAML, a line for a site, so that `diff` and people can read it.

    Raises:
        ValueError: For a compressor that no name in a config stands for.
    """
    tree = _tree(config)
    text = _TITLE
    for key, value in tree.items():
        if key in _PARTS:
            decisions = [*sites.get(key, ())]
            value.pop("sites")
            text += f"{key}:\n" + _section(value) + _sites(decisions)
        else:
            text += f"{key}: {_flow(value)}\n"
    return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not a YAML file: {error}") from error


def _is_plan(text: str) -> bool:
    """Return whether the first key is a plan's header, also for a file that does not parse."""
    written = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return next(written, "").partition(":")[0].strip(" '\"") == HEADER


def _checked(values: dict[str, Any], lines: dict[tuple[str, ...], int], name: str) -> Config:
    def at(*path: str) -> str:
        while path and path not in lines:
            path = path[:-1]
        return f"{name}, line {lines.get(path, 1)}"

    for key, value in values.items():  # part by part, so that a mistake has its line
        try:
            check_keys({key: value}, Config)
            own = OmegaConf.create({key: value}, flags={"allow_objects": True})
            from_mapping(own)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{at(*_blamed(key, value, str(error)))}: {error}") from error
    for part in _PARTS:
        for site, what in ((values.get(part) or {}).get("sites") or {}).items():
            if len(str(site).split(" / ")) != 3:
                allowed = "three names with ' / ' between"
                raise ValueError(f"{at(part, 'sites', site)}: site {site!r}; allowed: {allowed}")
            try:
                build(what)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{at(part, 'sites', site)}: {error}") from error
    try:
        return from_mapping(OmegaConf.merge(OmegaConf.structured(Config), values))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _blamed(key: str, value: Any, message: str) -> tuple[str, ...]:
    """Return the path of keys that a message names."""
    if isinstance(value, Mapping):
        for inner, below in value.items():
            if f"{key}.{inner}" in message or f"'{inner}'" in message:
                return (key, *_blamed(str(inner), below, message))
    return (key,)


def _lines(node: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], int]]:
    """Map every key to its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


def _section(values: Mapping[str, Any]) -> str:
    text = ""
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = "".join(f"  - {_flow(_short(item))}\n" for item in value)
            text += f"  {key}:\n{items}"
        else:
            text += f"  {key}: {_flow(value)}\n"
    return text


def _short(rule: dict[str, Any]) -> dict[str, Any]:
    """Return a rule without the patterns that match everything."""
    return {key: value for key, value in rule.items() if value != "*"}


def _sites(decisions: list[_Line]) -> str:
    if not decisions:
        return "  sites: {}\n"
    text = "  sites:\n"
    for site, compressor, comment in decisions:
        note = f"  # {comment}" if comment else ""
        text += f"    {_flow(site)}: {_flow(spec(compressor))}{note}\n"
    return text


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _tree(value: Any) -> Any:
    """Return a config with its preset filled in, as plain values."""
    if isinstance(value, Compressor):
        return spec(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.name != "preset"]
        return {name: _tree(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _tree(inner) for key, inner in value.items()}
    return [_tree(inner) for inner in value] if isinstance(value, list | tuple) else value
