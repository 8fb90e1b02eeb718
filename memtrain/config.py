"""What a user can ask for: the typed schema, and the six ways to give it."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.precision.options import Precision

CONFIGS = "pkg://memtrain.configs"
KEEP = "keep"
WEIGHTS = (KEEP, "bf16", "bf16+sr", "bf16+8", "bf16+16", "fp16", "fp16+8", "fp16+16")
GRADIENTS = (KEEP, "release")


@dataclass(kw_only=True)
class ActivationRule:
    """Sites of saved tensors, and what is done to them. Patterns are globs, `|` separates them."""

    module: str = "*"
    """Path of the module whose forward saves the tensor, as in `named_modules()`."""
    op: str = "*"
    """The op that saves it: `linear`, `gelu`, `layer_norm`, `scaled_dot_product_attention` ..."""
    tensor: str = "*"
    """Which of the op's tensors: `input`, `input1` ..., `saved` (a copy, a statistic)."""
    compressor: Any = KEEP
    """A name, or `{name: ..., ...}` with the compressor's own fields; `keep` leaves it alone."""


@dataclass(kw_only=True)
class StateRule:
    """Optimizer states, and what is done to them. Patterns are globs, `|` separates them."""

    parameter: str = "*"
    """Name of the parameter, as in `named_parameters()`."""
    state: str = "*"
    """Name of the state, as in the optimizer's `state`: `exp_avg`, `momentum_buffer` ..."""
    compressor: Any = KEEP
    """`B128/DE`, `Rank-1/Linear`, `factored` ..., or `{name: ..., ...}`; `keep` leaves it alone."""


@dataclass(kw_only=True)
class Activations:
    """Saved tensors."""

    exceptions: list[ActivationRule] = field(default_factory=list)
    """Your own rules, tried before `rules`. One whose module does not exist is an error."""
    rules: list[ActivationRule] = field(default_factory=list)
    """The preset's rules: ordered, first match wins; one that matches nothing is listed."""
    sites: dict[str, Any] = field(default_factory=dict)
    """`module / op / tensor` -> compressor: a plan file's decisions, before every rule. A site
    that does not exist is an error."""
    recompute: list[str] = field(default_factory=list)
    """Modules (paths; globs) that keep their inputs only, and run again in the backward. Of nested
    ones the outermost. One that does not exist is an error."""
    min_elements: int = 1024
    """Smaller tensors are kept as they are."""
    derive_outputs: bool = True
    """An op's output that another op saves is computed again from the payload of the op's input
    (a nonlinearity's kept in groups, a norm's), where that spares a payload."""
    backward_bytes: int | None = None
    """A convolution's backward decompresses at most so many bytes of its input at once and works
    through the batch in pieces; empty: the whole batch at once."""
    average_bits: float | None = None
    """Bits per element over all sites whose rule says `bits: auto`, 1 to 8."""
    adapt_interval: int = 1000
    """Steps from one measurement of their sensitivities to the next."""
    sensitivity: str = "statistics"
    """How they are measured: `statistics` (ActNN: from a step's own forward and backward) or
    `passes` (GACT: three backward passes a site, by `memtrain.adapter(model).step(closure)`)."""
    sample_statistics: bool = False
    """Remember the gradient's norm of every sample of the data set (ActNN's `use_gradient`)."""

    def __post_init__(self) -> None:
        _at_least("activations.min_elements", self.min_elements, 0)
        if self.backward_bytes is not None:
            _at_least("activations.backward_bytes", self.backward_bytes, 1)
        _at_least("activations.adapt_interval", self.adapt_interval, 1)
        if self.average_bits is not None and not 1 <= self.average_bits <= 8:
            raise ValueError(f"activations.average_bits={self.average_bits}; allowed: 1 to 8")
        if self.sensitivity not in (allowed := ("statistics", "passes")):
            value = self.sensitivity
            raise ValueError(f"activations.sensitivity={value!r}; {nearest(value, allowed)}")


@dataclass(kw_only=True)
class Optim:
    """Optimizer states."""

    exceptions: list[StateRule] = field(default_factory=list)
    """Your own rules, tried before `rules`. One whose parameter does not exist is an error."""
    rules: list[StateRule] = field(default_factory=list)
    """The preset's rules: ordered, first match wins; one that matches nothing is listed."""
    sites: dict[str, Any] = field(default_factory=dict)
    """`parameter / optimizer / state` -> compressor: a plan file's decisions, before every rule."""
    min_elements: int = 4096
    """States of parameters with no more elements are kept as they are (the paper's rule)."""

    def __post_init__(self) -> None:
        _at_least("optim.min_elements", self.min_elements, 0)


@dataclass(kw_only=True)
class Release:
    """How gradients are released, where `gradients=release`."""

    clip: str = "none"
    """`none`, `value`, `parameter` (each by its own norm), `previous` (by the last step's global
    norm) or `two_pass` (exact, by `optimizer.step(closure)`)."""
    limit: float = 1.0
    """Of the clipping."""
    loss_scale: float = 1.0
    """What the loss was multiplied with: gradients are divided by it."""
    skip_nonfinite: bool = True
    """Whether a gradient with NaN or Inf skips its parameter's update (on CUDA a wait for each)."""
    accumulate: int = 1
    """Backward passes that make a step: their gradients are added up in one byte an element."""

    def __post_init__(self) -> None:
        _at_least("release.accumulate", self.accumulate, 1)
        if self.accumulate > 1 and self.clip == "two_pass":
            value = self.accumulate
            raise ValueError(
                f"release.accumulate={value}; allowed with release.clip=two_pass: 1, since "
                "its closure runs backward once"
            )
        allowed = ("none", "value", "parameter", "previous", "two_pass")
        if self.clip not in allowed:
            raise ValueError(f"release.clip={self.clip!r}; {nearest(self.clip, allowed)}")
        for name in ("limit", "loss_scale"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"release.{name}={value} is out of range; allowed: above 0")


@dataclass(kw_only=True)
class Config:
    """Everything `memtrain.wrap` reads.

    Example:
        >>> config = load(["preset=smallest", "activations.min_elements=2048"])
        >>> config.activations.min_elements
        2048
    """

    preset: Any = None
    """Whose values fill a part whose rules are empty here. A Config without one does what its rules
    say, and nothing else; what `load` returns has its preset's rules in it already."""
    activations: Activations = field(default_factory=Activations)
    """Saved tensors."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer states."""
    weights: str = KEEP
    """Weights in 2 bytes with 8 or 16 bits of correction, or stochastic rounding (`+sr`): one of
    `WEIGHTS`. Of the presets only `all_four` sets it."""
    gradients: str = KEEP
    """`release`: weights are updated inside backward, and no gradient stays. Of the presets only
    `all_four` sets it."""
    release: Release = field(default_factory=Release)
    """How, where gradients are released."""
    precision: Precision = field(default_factory=Precision)
    """Which tensors of training are rounded to which float format."""
    seed: int = 0
    """Feeds every random bit of every compressor."""

    def __post_init__(self) -> None:
        for name, allowed in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; {nearest(value, allowed)}")
        if self.gradients != KEEP and self.activations.sensitivity == "passes":
            raise ValueError(
                "gradients='release' with activations.sensitivity='passes': its extra backward "
                "passes would update the weights; allowed: sensitivity='statistics'"
            )


def _at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ValueError(f"{name}={value} is out of range; allowed: {lowest} or more")


def load(cfg: "str | Path | Sequence[str] | Mapping[str, Any] | Config | None") -> Config:
    """Make a `Config` of any form that a user may give.

    Args:
        cfg: A preset's name (`"balanced"`, the default for None), the path of a YAML file, a list
            of Hydra overrides, a dict or a DictConfig (both may name a `preset`, whose values they
            then change), or a `Config`.

    Returns:
        The validated config.

    Raises:
        ValueError: For an unknown preset or key (the message gives the nearest valid one) or a
            value out of range.
        TypeError: For a value of the wrong type, or a `cfg` of another type.
        FileNotFoundError: For a YAML path that does not exist.

    Example:
        >>> load({"preset": "balanced", "seed": 3}).seed
        3
    """
    if isinstance(cfg, Config):
        return cfg if cfg.preset is None else _fill(cfg)
    if cfg is None:
        return from_mapping(compose([]))
    if isinstance(cfg, Path) or (isinstance(cfg, str) and cfg.endswith((".yaml", ".yml"))):
        return _overlay(OmegaConf.load(_existing(Path(cfg))))
    if isinstance(cfg, str):
        return from_mapping(compose([f"preset={cfg}"]))
    if isinstance(cfg, DictConfig):
        return _overlay(cfg)
    if isinstance(cfg, Mapping):
        return _overlay(OmegaConf.create(dict(cfg)))
    if isinstance(cfg, Sequence | ListConfig):
        return from_mapping(compose([str(item) for item in cfg]))
    raise TypeError(
        f"cfg is a {type(cfg).__name__}; allowed: a preset's name, a YAML path, a list of "
        "overrides, a dict, a DictConfig, a Config"
    )


def _fill(cfg: Config) -> Config:
    base, filled = load(str(cfg.preset)), dataclasses.replace(cfg, preset=None)
    for part in ("activations", "optim"):
        own = getattr(cfg, part)
        if not own.rules:
            plain = type(own)()
            changed = {key: x for key, x in vars(own).items() if x != getattr(plain, key)}
            setattr(filled, part, dataclasses.replace(getattr(base, part), **changed))
    for part in ("weights", "gradients"):
        if getattr(cfg, part) == KEEP:
            setattr(filled, part, getattr(base, part))
    if not cfg.precision.active:
        filled.precision = base.precision
    return filled


def compose(overrides: Sequence[str], name: str = "config") -> DictConfig:
    """Compose a primary config of `memtrain/configs` with Hydra; no file is written.

    Args:
        overrides: Hydra's: `"preset=smallest"`, `"activations.rules.0.compressor.bits=2"`.
        name: The primary config: `"config"` or `"train"`.

    Returns:
        The composed config, with its schema's types attached.

    Raises:
        ValueError: For an unknown key or group option, with the nearest valid one.

    Example:
        >>> compose(["preset=exact"]).activations.rules[0].compressor
        'identity'
    """
    # Hydra is imported here: importing memtrain must not need it, nor initialise it.
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
            return hydra_compose(name, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides, name) from error
    finally:
        GlobalHydra.instance().hydra = outer


def from_mapping(cfg: DictConfig) -> Config:
    """Pick memtrain's own keys from a composed config and validate them.

    Args:
        cfg: A composed config; keys that are not `Config`'s (an experiment's) are left out.

    Returns:
        The validated config.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """
    names = {item.name for item in dataclasses.fields(Config)}
    own = OmegaConf.create({key: cfg[key] for key in cfg if key in names})
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), own)
    except OmegaConfBaseException as error:
        raise TypeError(_first_line(error)) from error
    config = OmegaConf.to_object(merged)
    if not isinstance(config, Config):  # to_object gives back the schema's class
        raise TypeError(f"expected a Config, got {type(config).__name__}")
    return config


def nearest(value: str, allowed: Sequence[str]) -> str:
    """The end of an error message: the nearest allowed value, then all of them.

    Example:
        >>> nearest("balance", ["balanced", "exact"])
        "did you mean 'balanced'? allowed: balanced, exact"
    """
    close = difflib.get_close_matches(value, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(sorted(allowed))}"


def options(group: str) -> list[str]:
    """The names of a config group's files, such as the presets."""
    folder = Path(__file__).parent / "configs" / group
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _overlay(changes: Any) -> Config:
    """A preset (the one that `changes` names) with `changes` merged over it."""
    if not isinstance(changes, DictConfig):
        raise TypeError(f"a config is a mapping of keys, not {type(changes).__name__}")
    preset = changes.get("preset") or "balanced"
    check_keys(changes, Config)
    base = compose([f"preset={preset}"])
    own = OmegaConf.create({key: changes[key] for key in changes if key != "preset"})
    try:
        return from_mapping(OmegaConf.merge(base, own))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise TypeError(_first_line(error)) from error


def check_keys(cfg: Any, schema: type, path: str = "") -> None:
    """Raise for keys of `cfg` that are not fields of the dataclass `schema`, at any depth.

    Args:
        cfg: A mapping; lists in it are checked against their element's class.
        schema: A dataclass.
        path: Where `cfg` stands, for the message.

    Raises:
        ValueError: For an unknown key, with the nearest valid one.
        TypeError: For a value where a mapping or a list must stand.
    """
    if not isinstance(cfg, Mapping | DictConfig):
        raise TypeError(f"{path.rstrip('.') or 'a config'}={cfg!r} must be a mapping of keys")
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


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"config file {str(path)!r} does not exist")
    return path


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key")), "")
    return f"{key}: {lines[0]}" if key else lines[0]


def _explain(error: Exception, overrides: Sequence[str], name: str) -> Exception:
    """Turn Hydra's messages into one that names the value and what is allowed."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        group = options(key) if (Path(__file__).parent / "configs" / key).is_dir() else []
        if group and value not in group:
            return ValueError(f"unknown {key} {value!r}; {nearest(value, group)}")
    failed = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join(line.strip() for line in failed[:3])
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key and key in text:
            valid = _keys(name)
            if key not in valid:
                return ValueError(f"unknown key {key!r}; {_nearest_only(key, valid)}")
            return TypeError(f"{override!r}: {_first_line(error)}")
    return ValueError(text)


def _keys(name: str) -> list[str]:
    """Every dotted key of a primary config with its defaults."""

    def walk(node: Any, path: str) -> list[str]:
        if isinstance(node, Mapping | DictConfig):
            pairs = [(str(key), node[key]) for key in node]
        elif isinstance(node, list | ListConfig):
            pairs = [(str(index), item) for index, item in enumerate(node)]
        else:
            return [path]
        inner = [key for name, item in pairs for key in walk(item, f"{path}.{name}".lstrip("."))]
        return [path, *inner] if path else inner

    return walk(compose([], name), "")


def _nearest_only(value: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=3, cutoff=0.3)
    return f"nearest valid: {', '.join(close)}" if close else f"allowed: {', '.join(allowed)}"
