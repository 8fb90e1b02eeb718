"""Plans as YAML files that users can edit, compare, commit, and pass to `wrap`."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from memtrain.compressors import Compressor, Keep
from memtrain.config.sources import PLAN_KEY, PLAN_VERSION, Config
from memtrain.plan.compressor_specs import compressor_spec

_TITLE = f"""\
# A memtrain plan: memtrain.wrap(model, optimizer, "this_file.yaml"). Sites come before rules; the
# comments are for people, and nothing reads them.
{PLAN_KEY}: {PLAN_VERSION}
"""
_PARTS = ("activations", "optim")
_Line = tuple[str, Compressor | Keep, str]  # a site, its decision and a comment


def dumps(config: Config, sites: Mapping[str, Iterable[_Line]]) -> str:
    """Return the YAML text of a config whose sites are replaced, with one line per site."""
    text = _TITLE
    for key, value in _tree(config).items():
        if key in _PARTS:
            value.pop("sites")
            text += f"{key}:\n" + _section(value) + _sites([*sites.get(key, ())])
        else:
            text += f"{key}: {_flow(value)}\n"
    return text


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
    """Return a config as dicts, lists and scalars."""
    if isinstance(value, Compressor):
        return compressor_spec(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _tree(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _tree(inner) for key, inner in value.items()}
    return [_tree(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_file(path: Path, text: str) -> None:
    """Write a file completely or not at all; an existing one is replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OSError(f"cannot write the file {str(path)!r}: {error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
