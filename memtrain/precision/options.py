"""What a user can ask of precision: the fields of a config's `precision`."""

from dataclasses import dataclass, replace

from memtrain.kernels.floats.format_names import named_format
from memtrain.kernels.floats.formats import FloatFormat

FP32 = "fp32"
SIZED = ("size_ordered", "increasing", "random")
ASSIGNMENTS = (FP32, "uniform", "operator", "operator_out", *SIZED)
LOSS_SCALES = ("dynamic", "static", "none")


@dataclass(kw_only=True)
class Precision:
    """Which tensors of training are rounded to which float format.

    Example:
        >>> Precision(assignment="size_ordered", ratio=0.5).active
        True
    """

    assignment: str = FP32
    """`fp32` rounds nothing. `size_ordered`: groups of tensors between two GEMMs, largest first,
    become low until `ratio` of all elements is (`increasing`: smallest first; `random`).
    `uniform`: everything low. `operator`: what GEMMs read and the gradients of what they give;
    `operator_out`: also what they give."""
    ratio: float = 1.0
    """Of the elements of all tensors of training, 0 to 1; for the ordered assignments."""
    seed: int = 0
    """Of the order of `random`, and of stochastic rounding."""
    keep_first: bool = False
    """The first GEMM's input, weights and output gradient stay high."""
    keep_last: bool = False
    """The last GEMM's output and all that comes after it stay high."""
    low: str = "fp8_forward"
    """Low activations and weights: a name of `memtrain.precision.FORMATS`, or `1-E-M+bias`; with
    `:even` or `:stochastic` after it for another rounding."""
    low_backward: str = "fp8_backward"
    """Low gradients of activations."""
    high: str = "fp16"
    """All that is not low, and the gradients of weights. `fp16` is the paper's 1-6-9, not IEEE's;
    `fp32` leaves it as it is."""
    promotion: float | None = 0.01
    """A low activation or weight of which this share overflows becomes high for good; empty:
    never."""
    loss_scale: str = "dynamic"
    """`dynamic`, `static` (always `initial_scale`) or `none`. A GradScaler of the user's own turns
    it off."""
    initial_scale: float = 65536.0
    """A power of two."""
    growth_interval: int = 2000
    """Backward passes without an overflow after which the scale is doubled."""

    fp8_gemm: bool = False
    """Linear layers whose input and weight are low run on the device's FP8 GEMMs
    (`torch._scaled_mm`); `precision_state` lists those that do not, with the reason."""

    def __post_init__(self) -> None:
        _one_of("assignment", self.assignment, ASSIGNMENTS)
        _one_of("loss_scale", self.loss_scale, LOSS_SCALES)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"precision.ratio={self.ratio}; allowed: 0 to 1")
        if self.promotion is not None and not 0 < self.promotion <= 1:
            raise ValueError(
                f"precision.promotion={self.promotion}; allowed: above 0, up to 1; null"
            )
        scale = self.initial_scale
        if not 1 <= scale <= 2.0**32 or scale.hex().split("p")[0] != "0x1.0000000000000":
            raise ValueError(
                f"precision.initial_scale={scale}; allowed: powers of two from 1 to 2**32"
            )
        if self.growth_interval < 1:
            raise ValueError(f"precision.growth_interval={self.growth_interval}; allowed: from 1")
        if self.high_format is not None and self.high_format.bits < self.low_format.bits:
            raise ValueError(
                f"precision.high={self.high!r} has fewer bits than low={self.low!r}; "
                "allowed: at least as many"
            )
        low, back = self.low_format, _named("low_backward", self.low_backward)
        widths = [(form.exponent_bits, form.mantissa_bits) for form in (low, back)]
        if self.fp8_gemm and widths != [(4, 3), (5, 2)]:
            raise ValueError(
                f"precision.fp8_gemm=true with low={self.low!r} and low_backward="
                f"{self.low_backward!r}; allowed: 1-4-3 and 1-5-2 with any bias"
            )

    @property
    def active(self) -> bool:
        """Whether anything is rounded."""
        return self.assignment != FP32

    @property
    def low_format(self) -> FloatFormat:
        """Of low activations and weights."""
        return _named("low", self.low)

    @property
    def high_format(self) -> FloatFormat | None:
        """Of what is not low; None: left as it is."""
        return None if self.high == FP32 else _named("high", self.high)

    def backward_format(self, *, low: bool) -> FloatFormat | None:
        """Of gradients. They overflow to Inf, which the loss scale must see."""
        form = _named("low_backward", self.low_backward) if low else self.high_format
        return form and replace(form, overflow="inf")


def _named(field: str, name: str) -> FloatFormat:
    try:
        form = named_format(name)
    except ValueError as error:
        raise ValueError(f"precision.{field}={name!r}: {error}") from error
    return form


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"precision.{field}={value!r}; allowed: {', '.join(allowed)}")
