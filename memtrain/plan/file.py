"""Plans as YAML files that users can edit, compare, commit, and pass to `wrap`."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import Config, check_keys, from_mapping
from memtrain.config.sources import load as load_config
from memtrain.plan.compressor_specs import build_compressor, compressor_spec

HEADER, VERSION = "memtrain_plan", 1
_TITLE = f"""\
# A memtrain plan: memtrain.wrap(model, optimizer, "this_file.yaml"). Sites come before rules; the
# comments are for people, and nothing reads them.
{HEADER}: {VERSION}
"""
_PARTS = ("activations", "optim")
_Line = tuple[str, Compressor | Keep, str]  # a site, its decision and a comment


def load(cfg: Any) -> Config:
    """Load a `Config` from a plan file or any input of `memtrain.config.load`.

    Args:
        cfg: The path of a YAML file whose first key is `memtrain_plan` (`str` or `Path`), or
            another form of config.

    Returns:
        The validated config. That of a plan file is complete and needs no preset.

    Raises:
        ValueError: For a plan of another version, or an invalid plan, with the line.
        FileNotFoundError: If the path does not exist.
        TypeError: As `memtrain.config.load`.

    Example:
        >>> load("exact").activations.rules[0].compressor
        'identity'
    """
    if isinstance(cfg, Path) or (isinstance(cfg, str) and cfg.endswith((".yaml", ".yml"))):
        path = Path(cfg)
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{str(path)!r} is not a YAML file: {error}") from error
            # The first key decides, also for a file that YAML cannot parse.
            written = (line for line in text.splitlines() if line.strip() and line[0] != "#")
            if next(written, "").partition(":")[0].strip(" '\"") == HEADER:
                return loads(text, str(path))
    return load_config(cfg)


def loads(text: str, name: str = "plan") -> Config:
    r"""Load a config from the text of a plan.

    Args:
        text: The text from `Plan.to_yaml`, possibly edited.
        name: The file's name, for messages.

    Returns:
        The config of the plan.

    Raises:
        ValueError: If the text is not a plan of this version, or for its first mistake, with the
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
            raise ValueError(f"{name}, line {line}: {path[-1]!r} is also in line {lines[path]}")
        lines[path] = line
    version = values.pop(HEADER)
    if version != VERSION:
        where = f"{name}, line {lines[(HEADER,)]}"
        raise ValueError(f"{where}: {HEADER}={version!r}; allowed: {VERSION}")
    return _checked(values, lines, name)


def dumps(config: Config, sites: Mapping[str, Iterable[_Line]]) -> str:
    """Return the YAML text of a config whose sites are replaced, with one line per site.

    Raises:
        ValueError: For a compressor that configs cannot name.
    """
    text = _TITLE
    for key, value in _tree(config).items():
        if key in _PARTS:
            value.pop("sites")
            text += f"{key}:\n" + _section(value) + _sites([*sites.get(key, ())])
        else:
            text += f"{key}: {_flow(value)}\n"
    return text


def _checked(values: dict[str, Any], lines: dict[tuple[str, ...], int], name: str) -> Config:
    def at(*path: str) -> str:
        while path and path not in lines:
            path = path[:-1]
        return f"{name}, line {lines.get(path, 1)}"

    for key, value in values.items():  # one part at a time, so that a mistake has its line
        try:
            check_keys({key: value}, Config)
            own = OmegaConf.create({key: value}, flags={"allow_objects": True})
            from_mapping(own)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{at(*_blamed(key, value, str(error)))}: {error}") from error
    for part in _PARTS:
        for site, decision in ((values.get(part) or {}).get("sites") or {}).items():
            if len(str(site).split(" / ")) != 3:
                allowed = "three names with ' / ' between"
                raise ValueError(f"{at(part, 'sites', site)}: site {site!r}; allowed: {allowed}")
            try:
                build_compressor(decision)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{at(part, 'sites', site)}: {error}") from error
    try:
        return from_mapping(OmegaConf.merge(OmegaConf.structured(Config), values))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _blamed(key: str, value: Any, message: str) -> tuple[str, ...]:
    """Return the path of keys in a message."""
    if isinstance(value, Mapping):
        for inner, below in value.items():
            if f"{key}.{inner}" in message or f"'{inner}'" in message:
                return (key, *_blamed(str(inner), below, message))
    return (key,)


def _lines(node: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], int]]:
    """Yield every path of keys with its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _lines(value, here)


def _section(values: Mapping[str, Any]) -> str:
    text = ""
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            # Patterns that match everything are left out.
            rules = [{k: v for k, v in rule.items() if v != "*"} for rule in value]
            text += f"  {key}:\n" + "".join(f"  - {_flow(rule)}\n" for rule in rules)
        else:
            text += f"  {key}: {_flow(value)}\n"
    return text


def _sites(decisions: list[_Line]) -> str:
    if not decisions:
        return "  sites: {}\n"
    text = "  sites:\n"
    for site, compressor, comment in decisions:
        note = f"  # {comment}" if comment else ""
        text += f"    {_flow(site)}: {_flow(compressor_spec(compressor))}{note}\n"
    return text


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _tree(value: Any) -> Any:
    """Return a config without its preset as plain values."""
    if isinstance(value, Compressor):
        return compressor_spec(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if item.name != "preset"]
        return {name: _tree(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _tree(inner) for key, inner in value.items()}
    return [_tree(inner) for inner in value] if isinstance(value, list | tuple) else value
