"""Error messages for configs, with the wrong key or value and the nearest valid one."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig

_NO_LIST = "is not a ListConfig"  # OmegaConf's words


def nearest(value: str, allowed: Sequence[str]) -> str:
    """Return the end of an error message: the nearest allowed value, and all allowed values.

    Example:
        >>> nearest("balance", ["balanced", "exact"])
        "did you mean 'balanced'? allowed: balanced, exact"
    """
    close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(sorted(allowed))}"


def in_range(
    key: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Check a number against bounds."""
    checks = (
        ("above", above, lambda bound: value > bound),
        ("at least", at_least, lambda bound: value >= bound),
        ("at most", at_most, lambda bound: value <= bound),
        ("below", below, lambda bound: value < bound),
    )
    used = [(words, bound, holds) for words, bound, holds in checks if bound is not None]
    if not all(holds(bound) for _, bound, holds in used):  # a NaN fails every comparison
        allowed = " and ".join(f"{words} {bound}" for words, bound, _ in used)
        raise ValueError(f"{key}={value} is out of range; allowed: {allowed}")


def check_keys(cfg: Any, schema: type, path: str = "") -> None:
    """Check that all keys of `cfg` are fields of a dataclass, at any depth.

    Items of lists are checked against the element type. Messages begin with `path`.
    """
    if not isinstance(cfg, Mapping | DictConfig):
        name = path.rstrip(".") or "a config"
        word = isinstance(cfg, str) and cfg.isidentifier()
        hint = f"; a list of overrides may name a group: ['{name}={cfg}']" if word else ""
        raise TypeError(f"{name}={cfg!r} must be a mapping of keys{hint}")
    fields = {item.name: item for item in dataclasses.fields(schema)}
    for key in cfg:
        if key not in fields:
            raise ValueError(f"unknown key '{path}{key}'; {nearest(str(key), list(fields))}")
        inner, value = fields[key].type, cfg[key]
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            check_keys(value, inner, f"{path}{key}.")
        element = next(iter(getattr(inner, "__args__", ())), None)
        if isinstance(element, type) and dataclasses.is_dataclass(element):
            if not isinstance(value, list | ListConfig):
                raise TypeError(f"{path}{key}={value!r} must be a list")
            for index, item in enumerate(value):
                check_keys(item, element, f"{path}{key}.{index}.")


def first_line(error: Exception) -> str:
    """Return the key and the first line of an error of OmegaConf, or of its cause."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    what = "must be a list, in brackets" if _NO_LIST in lines[0] else lines[0]
    return f"{key}: {what}" if key else what


def explain(
    error: Exception,
    overrides: Sequence[str],
    options: Callable[[str], list[str]],
    defaults: Callable[[], Any],
) -> Exception:
    """Convert Hydra's error to one with the value and the allowed values.

    `options` maps a config group to the names of its files, other keys to none. `defaults` composes
    the same primary config without overrides.
    """
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        group = options(key)
        if group and value not in group:
            return ValueError(f"unknown {key} {value!r}; {nearest(value, group)}")
    failed = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join(line.strip() for line in failed[:3])
    keys = {override.lstrip("+~").partition("=")[0]: override for override in overrides}
    for key, override in sorted(keys.items(), key=lambda pair: -len(pair[0])):
        if key and key in text:
            valid = _keys(defaults(), "")
            if key not in valid and not options(key):
                close = difflib.get_close_matches(key, valid, n=3, cutoff=0.3)
                top = ", ".join(sorted(name for name in valid if "." not in name))
                allowed = f"nearest valid: {', '.join(close)}" if close else f"allowed: {top}"
                return ValueError(f"unknown key {key!r}; {allowed}")
            return TypeError(f"{override!r}: {first_line(error)}")
    return ValueError(text)


def _keys(node: Any, path: str) -> list[str]:
    """Return every dotted key of a config."""
    if isinstance(node, Mapping | DictConfig):
        pairs = [(str(key), node[key]) for key in node]
    elif isinstance(node, list | ListConfig):
        pairs = [(str(index), item) for index, item in enumerate(node)]
    else:
        return [path]
    inner = [key for name, item in pairs for key in _keys(item, f"{path}.{name}".lstrip("."))]
    return [path, *inner] if path else inner
