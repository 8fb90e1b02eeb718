"""The typed schema of `memtrain-train`: memtrain's own keys, and those of a training run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.config import sources as base
from memtrain.experiments.budget import PlannerConfig
from memtrain.experiments.sweep.grid import SweepConfig

RUNS = ("plain", "wrapped")
OPTIMIZERS = ("adamw", "sgd")
DEVICES = ("auto", "cpu", "cuda")

T = TypeVar("T")


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizer that the user would have written."""

    name: str = "adamw"
    """`adamw` or `sgd`."""
    lr: float = 1e-3
    """Highest learning rate, reached after the warm-up."""
    weight_decay: float = 0.1
    """Applied to parameters of two dimensions and more."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's."""
    eps: float = 1e-8
    """AdamW's."""
    momentum: float = 0.9
    """SGD's."""

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, OPTIMIZERS)
        in_range("optimizer.lr", self.lr, above=0)
        in_range("optimizer.weight_decay", self.weight_decay, at_least=0)
        in_range("optimizer.momentum", self.momentum, at_least=0, below=1)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optimizer.betas={self.betas} is out of range; allowed: two in [0, 1)"
            )


@dataclass(kw_only=True)
class TrainingConfig:
    """How long, how, and how often something is looked at. Periods are in steps, 0 is never."""

    runs: list[str] = field(default_factory=lambda: list(RUNS))
    """Which runs, in this order: `plain`, `wrapped`."""
    steps: int = 300
    """Optimizer steps of each run."""
    batch: int = 16
    """Sequences or images a step."""
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
    """Between validations; one comes at the end anyway."""
    eval_batches: int = 10
    """Batches a validation."""
    meter_every: int = 25
    """Between steps whose bytes are counted; they are left out of the step time."""
    checkpoint_every: int = 100
    """Between checkpoints; one is written at the end of each run anyway."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"training.runs=[] is empty; allowed: {', '.join(RUNS)}")
        for name in self.runs:
            one_of("training.runs", name, RUNS)
        if len(set(self.runs)) < len(self.runs):
            raise ValueError(f"training.runs={self.runs} names a run twice")
        one_of("training.device", self.device, DEVICES)
        for name in ("steps", "batch", "eval_batches"):
            in_range(f"training.{name}", getattr(self, name), at_least=1)
        for name in ("warmup", "clip", "eval_every", "meter_every", "checkpoint_every"):
            in_range(f"training.{name}", getattr(self, name), at_least=0)
        in_range("training.final_lr", self.final_lr, at_least=0, at_most=1)


@dataclass(kw_only=True)
class OutputConfig:
    """Where results go, and how much is shown."""

    folder: str = "outputs"
    """Each call makes a new folder `<folder>/<experiment>/<time>`."""
    plot: bool = True
    """Draw `plot.png`."""
    quiet: bool = False
    """No progress, only the table."""


@dataclass(kw_only=True)
class TrainConfig(base.Config):
    """Everything `memtrain-train` reads; memtrain's own keys lie beside the run's.

    Example:
        >>> config = from_mapping(compose(["experiment=smoke", "training.steps=7"]))
        >>> config.training.steps, config.model["name"]
        (7, 'gpt')
    """

    experiment: Any = "unnamed"
    """Names the output folder; set by the experiment's file."""
    model: dict[str, Any] = field(default_factory=dict)
    """`name` and that model's fields (`memtrain.experiments.models`)."""
    data: dict[str, Any] = field(default_factory=dict)
    """`name` and that data's fields (`memtrain.experiments.data`)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The run."""
    output: OutputConfig = field(default_factory=OutputConfig)
    """Files and display."""
    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Many runs instead of two, where it names families."""
    budget: str | None = None
    """Bytes for the peak of the wrapped run's step, such as `24GiB`: its plan is made to fit, and
    the preset's rules do not count. Empty: they do."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """How, with a budget."""
    resume: str | None = None
    """An output folder or a checkpoint to continue."""


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose `train.yaml` with Hydra overrides, under the schema `TrainConfig`.

    Args:
        overrides: `["experiment=digits", "preset=smallest", "training.steps=50"]`.

    Returns:
        The composed config.

    Raises:
        ValueError: For an unknown key or group option, with the nearest valid one.
        TypeError: For a value of the wrong type.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    return base.compose(overrides, name="train")


def from_mapping(cfg: DictConfig | Mapping[str, Any]) -> TrainConfig:
    """Validate a composed (or saved) config.

    Args:
        cfg: `TrainConfig`'s keys; missing ones take their defaults.

    Returns:
        The typed config.

    Raises:
        ValueError: For an unknown key, or a value out of range.
        TypeError: For a value of the wrong type.
    """
    return typed(TrainConfig, cfg, "")


def typed(schema: type[T], cfg: DictConfig | Mapping[str, Any], path: str) -> T:
    """Make a dataclass of a mapping: keys and types are checked, then `__post_init__` runs.

    Args:
        schema: A dataclass.
        cfg: Its fields.
        path: What stands before a key in messages, such as `"model."`.

    Returns:
        An instance of `schema`.

    Raises:
        ValueError: For a key that `schema` lacks, or a value that `__post_init__` refuses.
        TypeError: For a value of the wrong type.

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


def named(kind: str, spec: Mapping[str, Any], table: Mapping[str, type[T]]) -> T:
    """Build the entry of a registry that `spec["name"]` names, from spec's other keys.

    Args:
        kind: `"model"` or `"data"`, for messages.
        spec: `name` and the fields of the class it names.
        table: name -> dataclass.

    Returns:
        An instance of the class.

    Raises:
        ValueError: For a missing or unknown name, or an unknown field.
        TypeError: For a value of the wrong type.
    """
    name = one_of(f"{kind}.name", str(spec.get("name")), tuple(table))
    rest = {key: value for key, value in spec.items() if key != "name"}
    return typed(table[name], rest, f"{kind}.")


def one_of(key: str, value: str, allowed: Sequence[str]) -> str:
    """`value`, if it is allowed.

    Raises:
        ValueError: Naming the nearest allowed value.
    """
    if value not in allowed:
        raise ValueError(f"{key}={value!r} is unknown; {base.nearest(value, list(allowed))}")
    return value


def in_range(
    key: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Check a number against the bounds given.

    Raises:
        ValueError: Naming the key, the value and what is allowed.
    """
    checks = (
        ("above", above, lambda bound: value > bound),
        ("at least", at_least, lambda bound: value >= bound),
        ("at most", at_most, lambda bound: value <= bound),
        ("below", below, lambda bound: value < bound),
    )
    given = [(words, bound, holds) for words, bound, holds in checks if bound is not None]
    if not all(holds(bound) for _, bound, holds in given):  # a NaN fails every comparison
        allowed = " and ".join(f"{words} {bound}" for words, bound, _ in given)
        raise ValueError(f"{key}={value} is out of range; allowed: {allowed}")
