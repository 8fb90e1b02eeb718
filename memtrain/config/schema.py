"""The typed schema of a config, with every default."""

from dataclasses import dataclass, field
from typing import Any

from memtrain.config.errors import at_least, nearest
from memtrain.optim.wrappers.release_checks import check_options
from memtrain.precision.assignment import Precision

KEEP, CPU = "keep", "cpu"
WEIGHTS = (KEEP, "bf16", "bf16+sr", "bf16+8", "bf16+16", "fp16", "fp16+8", "fp16+16")
GRADIENTS = (KEEP, "release")
STATE_DEVICES = (KEEP, CPU)


@dataclass(kw_only=True)
class ActivationRule:
    """Sites of saved tensors, and their compressor. Patterns are globs, `|` separates them."""

    module: str = "*"
    """Path of the module whose forward saves the tensor, as in `named_modules()`."""
    op: str = "*"
    """The op that saves it: `linear`, `gelu`, `layer_norm`, `scaled_dot_product_attention` ..."""
    tensor: str = "*"
    """Which of the op's tensors: `input`, `input1` ..., `saved` (a copy, a statistic)."""
    compressor: Any = KEEP
    """A name, or `{name: ..., ...}` with the compressor's own fields, which replaces the preset's
    (without a `name` it changes those fields); `keep` leaves it alone."""


@dataclass(kw_only=True)
class StateRule:
    """Optimizer states, and their compressor. Patterns are globs, `|` separates them."""

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
    """Modules (paths; globs) that keep their inputs only, and are recomputed in the backward;
    `@blocks`: those that the model repeats. Of nested ones the outermost. One that does not exist
    is an error."""
    recompute_inputs: Any = "keep"
    """A compressor for the inputs of those modules.
    `keep`: their gradients are plain training's to the last bit."""
    min_elements: int = 1024
    """Smaller tensors are kept as they are."""
    derive_outputs: bool = True
    """A norm's output that another op saves is recomputed from the payload that the norm keeps."""
    derive_products: bool = False
    """Recompute outputs of SiLU and GELU that have a `group` rule, products, and casts of
    attention's output, from what these ops store."""
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
    verify: bool = False
    """Compare what replaced ops return, and what backward reads, with the exact values in the first
    three forwards of a run; an error names the site. Copies of all saved tensors live meanwhile."""

    def __post_init__(self) -> None:
        at_least("activations.min_elements", self.min_elements, 0)
        if self.backward_bytes is not None:
            at_least("activations.backward_bytes", self.backward_bytes, 1)
        at_least("activations.adapt_interval", self.adapt_interval, 1)
        if self.average_bits is not None and not 1 <= self.average_bits <= 8:
            raise ValueError(f"activations.average_bits={self.average_bits}; allowed: 1 to 8")
        if self.sensitivity not in (allowed := ("statistics", "passes")):
            value = self.sensitivity
            raise ValueError(f"activations.sensitivity={value!r}; {nearest(value, allowed)}")


@dataclass(kw_only=True)
class Optim:
    """Optimizer states."""

    exceptions: list[StateRule] = field(default_factory=list)
    """Your own rules, for any optimizer, tried before `rules`. Their parameters must exist."""
    rules: list[StateRule] = field(default_factory=list)
    """The preset's rules: ordered, first match wins; for optimizers that memtrain knows."""
    sites: dict[str, Any] = field(default_factory=dict)
    """`parameter / optimizer / state` -> compressor: a plan file's decisions, before every rule."""
    min_elements: int = 4096
    """States of parameters with no more elements are kept as they are (the paper's rule)."""
    device: str = KEEP
    """`cpu`: states lie in host memory and are stepped there, which gradients are copied to and
    updated weights from; `keep`: where the parameters are."""

    def __post_init__(self) -> None:
        at_least("optim.min_elements", self.min_elements, 0)
        if (value := self.device) not in STATE_DEVICES:
            raise ValueError(f"optim.device={value!r} is unknown; {nearest(value, STATE_DEVICES)}")


@dataclass(kw_only=True)
class Release:
    """Options of released gradients, where `gradients=release`."""

    clip: str = "none"
    """`none`, `value`, `parameter` (each by its own norm), `previous` (by the last step's global
    norm), `two_pass` (exact, by `optimizer.step(closure)`) or, where `optim.device=cpu`,
    `global_norm` (exact: gradients wait on the host until the norm of all is known)."""
    limit: float = 1.0
    """Of the clipping."""
    loss_scale: float = 1.0
    """The factor of the loss: gradients are divided by it."""
    skip_nonfinite: bool = True
    """Whether a gradient with NaN or Inf skips its parameter's update (on CUDA a wait for each)."""
    accumulate: int = 1
    """Backward passes that make a step: their gradients are added up in one byte an element."""

    def __post_init__(self) -> None:
        check_options(self.clip, self.limit, self.loss_scale, self.accumulate, "release.")


@dataclass(kw_only=True)
class Config:
    """Everything `memtrain.wrap` reads.

    Example:
        >>> from memtrain.config.sources import load
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
    `WEIGHTS`. Of the presets only `all_four` and `all_four_2bit` set it."""
    float32_outputs: bool = True
    """Whether a model's output stays float32 where its weights are split, as without memtrain: its
    losses, if it returns any, else every tensor in it. False leaves what the weights' dtype gives.
    """
    gradients: str = KEEP
    """`release`: weights are updated inside backward, and no gradient stays. Of the presets only
    `all_four` and `all_four_2bit` set it."""
    release: Release = field(default_factory=Release)
    """How, where gradients are released."""
    precision: Precision = field(default_factory=Precision)
    """Which tensors of training are rounded to which float format."""
    seed: int = 0
    """Feeds every random bit of every compressor."""
    strict: bool = False
    """Whether saved tensors that the rules cannot reach (torch.compile, others' hooks, activation
    checkpointing) are an error at the first step, before it changes anything; else one warning."""

    def __post_init__(self) -> None:
        for name, allowed in (("weights", WEIGHTS), ("gradients", GRADIENTS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; {nearest(value, allowed)}")
        if self.release.clip == "global_norm" and self.optim.device != CPU:
            raise ValueError(
                "release.clip='global_norm' keeps all gradients until step(), which spares nothing "
                "where they are; allowed with optim.device=cpu; without it: two_pass, or "
                "gradients=keep and torch.nn.utils.clip_grad_norm_"
            )
        if self.gradients != KEEP and self.activations.sensitivity == "passes":
            raise ValueError(
                "gradients='release' with activations.sensitivity='passes': its extra backward "
                "passes would update the weights; allowed: sensitivity='statistics'"
            )
