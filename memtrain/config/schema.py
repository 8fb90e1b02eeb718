"""The typed schema of a config, with all defaults."""

from dataclasses import dataclass, field
from typing import Any

from memtrain.config.errors import in_range, nearest
from memtrain.optim.wrappers.release_checks import check_options
from memtrain.precision.assignment import Precision

KEEP, CPU = "keep", "cpu"
WEIGHTS = (KEEP, "bf16", "bf16+sr", "bf16+8", "bf16+16", "fp16", "fp16+8", "fp16+16")
GRADIENTS = (KEEP, "release")
STATE_DEVICES = (KEEP, CPU)


@dataclass(kw_only=True)
class ActivationRule:
    """A compressor for sites of saved tensors. Patterns are globs; `|` separates them."""

    module: str = "*"
    """Path of the module whose forward saves the tensor, as in `named_modules()`."""
    op: str = "*"
    """The op: `linear`, `gelu`, `layer_norm`, `scaled_dot_product_attention` ..."""
    tensor: str = "*"
    """The role of the tensor: `input`, `input1` ..., or `saved` (a copy, a statistic)."""
    compressor: Any = KEEP
    """A name, or `{name: ..., ...}` with the compressor's fields, which replaces the preset's
    compressor. A mapping without `name` changes fields of the preset's. `keep` keeps the tensor."""


@dataclass(kw_only=True)
class StateRule:
    """A compressor for optimizer states. Patterns are globs; `|` separates them."""

    parameter: str = "*"
    """Name of the parameter, as in `named_parameters()`."""
    state: str = "*"
    """Name of the state, as in the optimizer's `state`: `exp_avg`, `momentum_buffer` ..."""
    compressor: Any = KEEP
    """`B128/DE`, `Rank-1/Linear`, `factored` ..., or `{name: ..., ...}`; `keep` keeps the state."""


@dataclass(kw_only=True)
class Activations:
    """Saved tensors."""

    exceptions: list[ActivationRule] = field(default_factory=list)
    """The user's rules, tried before `rules`. A module that does not exist is an error."""
    rules: list[ActivationRule] = field(default_factory=list)
    """The preset's ordered rules: the first match wins."""
    sites: dict[str, Any] = field(default_factory=dict)
    """`module / op / tensor` -> compressor: a plan file's decisions, before all rules. A site that
    does not exist is an error."""
    recompute: list[str] = field(default_factory=list)
    """Modules (paths or globs) that save only their inputs and are recomputed in the backward.
    `@blocks`: the modules that the model repeats. The outermost of nested ones counts. A module
    that does not exist is an error."""
    recompute_inputs: Any = "keep"
    """A compressor for the inputs of those modules. `keep`: gradients equal the baseline's to the
    last bit."""
    min_elements: int = 1024
    """Smaller tensors are kept."""
    derive_products: bool = False
    """Recompute outputs of SiLU and GELU that have a `group` rule, products, and dropped outputs,
    from what these ops store."""
    average_bits: float | None = None
    """Bits per element over all sites with `bits: auto`, 1 to 8."""
    adapt_interval: int = 1000
    """Steps between two measurements of their sensitivities."""
    sensitivity: str = "statistics"
    """`statistics` (ActNN: from a step's own forward and backward) or `passes` (GACT: three
    backward passes per site, by `memtrain.adapter(model).step(closure)`)."""
    verify: bool = False
    """Whether the first three forwards compare results of replaced ops and tensors of the backward
    with exact values. An error names the site. Copies of all saved tensors are kept meanwhile."""

    def __post_init__(self) -> None:
        in_range("activations.min_elements", self.min_elements, at_least=0)
        in_range("activations.adapt_interval", self.adapt_interval, at_least=1)
        if self.average_bits is not None and not 1 <= self.average_bits <= 8:
            raise ValueError(f"activations.average_bits={self.average_bits}; allowed: 1 to 8")
        if self.sensitivity not in (allowed := ("statistics", "passes")):
            value = self.sensitivity
            raise ValueError(f"activations.sensitivity={value!r}; {nearest(value, allowed)}")


@dataclass(kw_only=True)
class Optim:
    """Optimizer states."""

    exceptions: list[StateRule] = field(default_factory=list)
    """The user's rules for any optimizer, tried before `rules`. A parameter that does not exist is
    an error."""
    rules: list[StateRule] = field(default_factory=list)
    """The preset's ordered rules for optimizers that memtrain knows: the first match wins."""
    sites: dict[str, Any] = field(default_factory=dict)
    """`parameter / optimizer / state` -> compressor: a plan file's decisions, before all rules."""
    min_elements: int = 4096
    """States of parameters with at most as many elements are kept (the paper's rule)."""
    device: str = KEEP
    """`cpu`: states are in host memory and stepped there; gradients are copied to the host, and
    updated weights back. `keep`: states are on the parameters' device."""

    def __post_init__(self) -> None:
        in_range("optim.min_elements", self.min_elements, at_least=0)
        if (value := self.device) not in STATE_DEVICES:
            raise ValueError(f"optim.device={value!r} is unknown; {nearest(value, STATE_DEVICES)}")


@dataclass(kw_only=True)
class Release:
    """Options of released gradients, for `gradients=release`."""

    clip: str = "none"
    """`none`, `value`, `parameter` (by its own norm), `previous` (by the last step's global norm),
    `two_pass` (exact, by `optimizer.step(closure)`) or, with `optim.device=cpu`, `global_norm`
    (exact: gradients wait on the host for the norm of all)."""
    limit: float = 1.0
    """The limit of clipping."""
    loss_scale: float = 1.0
    """The factor of the loss, by which gradients are divided."""
    skip_nonfinite: bool = True
    """Whether a gradient with NaN or Inf skips its parameter's update. On CUDA each parameter then
    synchronizes with the host."""
    accumulate: int = 1
    """Backward passes per step. Their gradients are added in one byte per element."""

    def __post_init__(self) -> None:
        check_options(self.clip, self.limit, self.loss_scale, self.accumulate, "release.")


@dataclass(kw_only=True)
class Config:
    """Store the config of `memtrain.wrap`; each field is a key of a YAML file or an override.

    Example:
        >>> from memtrain.config.sources import load
        >>> config = load(["preset=smallest", "activations.min_elements=2048"])
        >>> config.activations.min_elements
        2048
    """

    activations: Activations = field(default_factory=Activations)
    """Saved tensors."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer states."""
    weights: str = KEEP
    """Weights in 2 bytes with 8 or 16 bits of correction, or stochastic rounding (`+sr`): one of
    `WEIGHTS`. Only the presets `all_four` and `all_four_2bit` set it."""
    float32_outputs: bool = True
    """Whether a model with split weights returns float32: its losses, if it returns any, else every
    tensor. If false, outputs have the weights' dtype."""
    gradients: str = KEEP
    """`release`: the backward updates weights and frees each gradient. Only the presets `all_four`
    and `all_four_2bit` set it."""
    release: Release = field(default_factory=Release)
    """Options of released gradients."""
    precision: Precision = field(default_factory=Precision)
    """Float formats of the tensors of training."""
    seed: int = 0
    """The seed of all compressors."""
    strict: bool = False
    """Whether saved tensors that rules cannot reach (torch.compile, other hooks, activation
    checkpointing) raise an error before the first step, instead of one warning."""

    def __post_init__(self) -> None:
        for name, allowed in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; {nearest(value, allowed)}")
        if self.release.clip == "global_norm" and self.optim.device != CPU:
            raise ValueError(
                "release.clip='global_norm' keeps all gradients until step(), which saves no "
                "device memory; allowed with optim.device=cpu; without it: two_pass, or "
                "gradients=keep and torch.nn.utils.clip_grad_norm_"
            )
        if self.gradients != KEEP and self.activations.sensitivity == "passes":
            raise ValueError(
                "gradients='release' with activations.sensitivity='passes': its extra backward "
                "passes would update the weights; allowed: sensitivity='statistics'"
            )
