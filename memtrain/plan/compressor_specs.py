"""Conversion between a config's values and compressors."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.compressors import COMPRESSORS, Compressor, Host, Keep
from memtrain.compressors.auto import Auto
from memtrain.compressors.named import named
from memtrain.config.sources import KEEP, nearest

RULE_KEEPS = Keep("its rule says keep")
AUTO = "auto"
_EXAMPLES = "keep, identity, B128/DE, {name: group, bits: 4} ..."


def build_compressor(spec: object, *, signed: bool = True) -> Compressor | Keep:
    """Build a compressor from a config's value.

    A value is a name such as `"B128/DE"`, a mapping with `name` and the compressor's fields, a
    compressor, or `"keep"`. `bits: auto` gives an `Auto`. Some names need to know whether the
    tensor has negative values (`signed`).

    Example:
        >>> build_compressor({"name": "group", "bits": 2}).bits
        2
    """
    if spec == KEEP:
        return RULE_KEEPS
    if isinstance(spec, str):
        try:
            return named(spec, signed=signed)
        except ValueError as error:
            if spec not in COMPRESSORS:
                raise
            raise ValueError(f"compressor {spec!r} is a mapping: {{name: {spec}, ...}}") from error
    if isinstance(spec, Compressor):
        return spec
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise TypeError(
            f"compressor {spec!r} is neither a name nor a mapping with a 'name'; "
            f"allowed: {_EXAMPLES}"
        )
    values = dict(spec)
    name = str(values.pop("name"))
    if "inner" in values:
        return _build_host(name, values, signed)
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compressor {name!r}; {nearest(name, list(COMPRESSORS))}")
    cls = COMPRESSORS[name]
    if cls is Host:
        raise ValueError("compressor 'host' without inner; allowed: {name: host, inner: {...}}")
    items = tuple((key, type(value), value) for key, value in values.items())
    # A plan has hundreds of sites with few different compressors, and type checks are slow.
    plain = all(isinstance(value, int | float | str | None) for value in values.values())
    return (_build_from_fields if plain else _build_from_fields.__wrapped__)(name, cls, items)


@cache
def _build_from_fields(
    name: str, cls: type[Compressor], items: tuple[tuple[str, type, Any], ...]
) -> Compressor:
    """Build a compressor from its fields, cached."""
    values: dict[str, Any] = {key: value for key, _, value in items}
    allowed = [item.name for item in fields(cls)]  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in allowed:
            raise ValueError(f"compressor {name!r} has no field {key!r}; {nearest(key, allowed)}")
    auto = values.get("bits") == AUTO
    if auto:
        del values["bits"]
    try:
        typed: Any = OmegaConf.merge(OmegaConf.structured(cls), values)
    except OmegaConfBaseException as error:
        raise TypeError(f"compressor {name!r}: {str(error).splitlines()[0]}") from error
    built = cls(**{key: typed[key] for key in values})
    return Auto(template=built) if auto else built


def compressor_spec(compressor: Compressor | Keep) -> Any:
    """Return the config's value from which `build_compressor` makes an equal compressor.

    A mapping has `name`, `bits` and the fields that differ from their defaults.

    Example:
        >>> from memtrain.compressors import Group, Keep
        >>> compressor_spec(Group(bits=2)), compressor_spec(Keep("no rule matches"))
        ({'name': 'group', 'bits': 2}, 'keep')
    """
    if isinstance(compressor, Keep):
        return KEEP
    if isinstance(compressor, Auto):
        inner = compressor_spec(compressor.template)
        inner.get("inner", inner)["bits"] = AUTO
        return inner
    name = next((key for key, cls in COMPRESSORS.items() if cls is type(compressor)), None)
    if name is None:
        raise ValueError(f"{compressor!r} cannot be written: allowed: {', '.join(COMPRESSORS)}")
    result: dict[str, Any] = {"name": name}
    for item in fields(compressor):  # type: ignore[arg-type]
        value = getattr(compressor, item.name)
        if isinstance(value, Compressor):
            result[item.name] = compressor_spec(value)
        elif item.name == "bits" or value != item.default:
            result[item.name] = [*value] if isinstance(value, tuple) else value
    return result


def _build_host(name: str, values: dict[str, Any], signed: bool) -> Compressor:
    """Build a `Host` from the mapping of its `inner` compressor."""
    if COMPRESSORS.get(name) is not Host or len(values) > 1:
        raise ValueError(f"compressor {name!r} with {sorted(values)}; allowed: host with inner")
    inner = build_compressor(values["inner"], signed=signed)
    if isinstance(inner, Keep):
        raise ValueError(f"inner={values['inner']!r}; allowed: a compressor")
    if isinstance(inner, Auto):
        return Auto(template=Host(inner=inner.template))
    return Host(inner=inner)
