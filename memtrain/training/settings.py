"""The typed schema of `memtrain-train`: memtrain's own keys, and those of a training run."""

import inspect
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain import configs
from memtrain.audit.peak import StepOptions
from memtrain.config import sources as base
from memtrain.config.errors import in_range
from memtrain.planner import Goal

RUNS = ("plain", "wrapped")
COMPILE = ("false", "true", "blocks")
"""Values of the key `compile`: the model is as it is, is compiled whole, or block by block."""
DEVICES = ("auto", "cpu", "cuda")
WITH_PATH = {"model": ("hf", "py"), "data": ("text", "py")}
"""Options of config groups that take a path: `model=hf:<path>`."""
FINETUNE = "finetune"
"""The experiment where one of them is chosen and no experiment is."""

T = TypeVar("T")

OmegaConf.register_new_resolver(  # a path in Python's standard library: text on every machine
    "python_library", lambda name: str(Path(sysconfig.get_path("stdlib")) / name), replace=True
)
OmegaConf.register_new_resolver(  # a path beside the packaged configs
    "packaged", lambda name: str(Path(configs.__file__).parent / name), replace=True
)


@dataclass(kw_only=True)
class OptimizerConfig:
    """Arguments of AdamW."""

    lr: float = 1e-3
    """Highest learning rate, reached after the warm-up."""
    weight_decay: float = 0.1
    """Applied to parameters of two dimensions and more."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8

    def __post_init__(self) -> None:
        in_range("optimizer.lr", self.lr, above=0)
        in_range("optimizer.weight_decay", self.weight_decay, at_least=0)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optimizer.betas={self.betas} is out of range; allowed: two in [0, 1)"
            )


@dataclass(kw_only=True)
class TrainingConfig:
    """Length, schedule, and periods. Periods are in steps; 0 is never."""

    runs: list[str] = field(default_factory=lambda: list(RUNS))
    """Which runs, in this order: `plain` (the baseline), `wrapped`."""
    steps: int = 300
    """Optimizer steps of each run."""
    batch: int = 16
    """Rows per step."""
    accumulate: int = 1
    """Backward passes per step; each takes an equal part of the batch."""
    warmup: int = 20
    """Steps over which the learning rate rises from zero."""
    final_lr: float = 0.1
    """The cosine's end, as a fraction of `optimizer.lr`."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    autocast: bool = False
    """Run the forward under bfloat16 autocast."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu` or `cuda`."""
    eval_every: int = 50
    """Period of validations; the last step is always followed by one."""
    eval_batches: int = 10
    """Batches per validation."""
    meter_every: int = 25
    """Period of steps whose bytes are counted; their time is left out of the step time."""
    checkpoint_every: int = 100
    """Period of checkpoints; one is always written at the end of a run."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"training.runs=[] is empty; allowed: {', '.join(RUNS)}")
        for name in self.runs:
            one_of("training.runs", name, RUNS)
        if len(set(self.runs)) < len(self.runs):
            raise ValueError(f"training.runs={self.runs} names a run twice")
        one_of("training.device", self.device, DEVICES)
        for name in ("steps", "batch", "accumulate", "eval_batches"):
            in_range(f"training.{name}", getattr(self, name), at_least=1)
        periods = ("warmup", "clip", "eval_every", "meter_every", "checkpoint_every")
        for name in periods:
            in_range(f"training.{name}", getattr(self, name), at_least=0)
        if self.batch % self.accumulate:
            raise ValueError(
                f"training.batch={self.batch} is not a multiple of "
                f"training.accumulate={self.accumulate}"
            )
        in_range("training.final_lr", self.final_lr, at_least=0, at_most=1)


@dataclass(kw_only=True)
class OutputConfig:
    """Where results go, and what is printed."""

    folder: str = "outputs"
    """Each call creates a new folder `<folder>/<experiment>/<time>`."""
    quiet: bool = False
    """Print the table only, no progress."""


@dataclass(kw_only=True)
class PlannerConfig:
    """How a plan is made for a budget."""

    allow: list[str] = field(default_factory=lambda: ["quantise", "recompute"])
    """Names of `memtrain.planner.ALLOWED`."""
    max_error: float = 1.0
    """The most noise, relative to the preset `balanced`."""
    objective: str = "time"
    """`time` or `error`."""

    def __post_init__(self) -> None:
        self.goal()

    def goal(self, options: StepOptions = StepOptions()) -> Goal:  # noqa: B008 (a frozen value)
        """Return the planner's goal."""
        return Goal(
            allow=self.allow,
            max_error=self.max_error,
            objective=self.objective,  # type: ignore[arg-type]
            options=options,
        )


@dataclass(kw_only=True)
class TrainConfig(base.Config):
    """All keys of `memtrain-train`: memtrain's keys and those of a training run.

    Example:
        >>> config = from_mapping(compose(["experiment=smoke", "training.steps=7"]))
        >>> config.training.steps, config.model["name"]
        (7, 'gpt')
    """

    experiment: Any = "unnamed"
    """Name of the output folder; set by the experiment's file."""
    model: dict[str, Any] = field(default_factory=dict)
    """`name` and the model's arguments (`memtrain.training.networks`)."""
    data: dict[str, Any] = field(default_factory=dict)
    """`name` and the data's arguments (`memtrain.training.data`)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The run."""
    output: OutputConfig = field(default_factory=OutputConfig)
    """Files and display."""
    budget: str | None = None
    """Bytes for the peak of the wrapped run's step, such as `24GiB`: the plan is made to fit, and
    replaces the preset's rules. Without a budget the preset decides."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """How the plan for a budget is made."""
    compile: str = "false"
    """`true`: compile both runs' models with `torch.compile`; `blocks`: compile each repeated block
    by itself."""
    resume: str | None = None
    """An output folder or a checkpoint to continue from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile = one_of("compile", self.compile.lower(), COMPILE)
        if self.compile != "false" and self.budget is not None:
            raise ValueError(
                f"compile={self.compile} with budget={self.budget}: plans for a budget are made "
                "for eager steps; allowed: compile=false, or budget=null"
            )


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose `train.yaml` with Hydra overrides, such as `training.steps=50`.

    Raises:
        ValueError: For an unknown key or group option, with the nearest valid one.
        TypeError: For a value of the wrong type.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    return base.compose(split_paths(overrides), name="train")


def split_paths(overrides: Sequence[str]) -> list[str]:
    """Split `model=hf:<path>` and the like into Hydra's overrides: the option, and its `path`.

    With such an override and no experiment, the experiment is `finetune`.

    Example:
        >>> split_paths(["model=hf:my model", "seed=1"])
        ['model=hf', "model.path='my model'", 'seed=1', 'experiment=finetune']
    """
    found: list[str] = []
    with_path = False
    for override in overrides:
        group, _, value = override.partition("=")
        option, colon, path = value.partition(":")
        if option not in WITH_PATH.get(group, ()):
            found.append(override)
            continue
        with_path = True
        found.append(f"{group}={option}")
        if colon:
            quoted = path.replace("\\", "\\\\").replace("'", "\\'")
            found.append(f"{group}.path='{quoted}'")
    named = any(override.startswith("experiment=") for override in overrides)
    return [*found, f"experiment={FINETUNE}"] if with_path and not named else found


def from_mapping(cfg: DictConfig | Mapping[str, Any]) -> TrainConfig:
    """Validate a composed (or saved) config; missing keys take their defaults.

    Raises:
        ValueError: For an unknown key, or a value out of range.
        TypeError: For a value of the wrong type.
    """
    return typed(TrainConfig, cfg, "")


def typed(schema: type[T], cfg: DictConfig | Mapping[str, Any], path: str) -> T:
    """Convert a mapping to a dataclass; check keys and types, then run `__post_init__`.

    `path` is the prefix of a key in messages, such as `"model."`.

    Example:
        >>> typed(OptimizerConfig, {"lr": 0.5}, "optimizer.").lr
        0.5
    """
    base.check_keys(cfg, schema, path)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(cfg))  # type: ignore[arg-type]
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise TypeError(f"{path}{getattr(error, 'full_key', '') or ''}: {text}") from error


def build_named(
    kind: str, spec: Mapping[str, Any], table: Mapping[str, Callable[..., T]], *arguments: Any
) -> T:
    """Call the entry of `table` named by `spec["name"]` with the other keys of `spec`, by type."""
    name = one_of(f"{kind}.name", str(spec.get("name")), tuple(table))
    parameters = inspect.signature(table[name]).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    rest = {key: value for key, value in spec.items() if key != "name"}
    for p in keywords:
        if p.default is p.empty and rest.get(p.name) in (None, MISSING):
            raise ValueError(f"{kind}={name} needs a path: {kind}={name}:<{p.name}>")
    keys = [
        (p.name, p.annotation, MISSING if p.default is p.empty else p.default) for p in keywords
    ]
    values = typed(make_dataclass(name, keys), rest, f"{kind}.")
    return table[name](*arguments, **vars(values))


def one_of(key: str, value: str, allowed: Sequence[str]) -> str:
    """Return `value` if it is allowed."""
    if value not in allowed:
        raise ValueError(f"{key}={value!r} is unknown; {base.nearest(value, list(allowed))}")
    return value
