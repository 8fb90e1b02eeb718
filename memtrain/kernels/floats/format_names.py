"""Float formats by the names that configs and papers give them."""

import re
from dataclasses import replace

from memtrain.kernels.floats.formats import (
    BF16,
    E4M3FN,
    E5M2,
    FP8_BACKWARD,
    FP8_FORWARD,
    FP16,
    IEEE_FP16,
    ROUNDINGS,
    FloatFormat,
)

_WIDTHS = re.compile(r"1-(\d{1,2})-(\d{1,2})(?:\+(\d{1,3}))?")

FORMATS = {
    "fp8_forward": FP8_FORWARD,
    "fp8_backward": FP8_BACKWARD,
    "fp16": FP16,
    "ieee_fp16": IEEE_FP16,
    "bf16": BF16,
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
}
"""name in a config -> format"""


def named_format(name: str) -> FloatFormat:
    """The format of a name.

    Args:
        name: One of `FORMATS`, or `1-E-M` or `1-E-M+bias`, as papers write widths: E exponent and M
            mantissa bits, without special codes, saturating, ties away from zero. `:away`, `:even`
            or `:stochastic` after any of these is another rounding.

    Returns:
        The format.

    Raises:
        ValueError: If the name is unknown, or the widths are not allowed.

    Example:
        >>> named_format("1-4-3+4") == named_format("fp8_forward") == FP8_FORWARD
        True
        >>> named_format("fp8_forward:stochastic").rounding
        'stochastic'
    """
    form, colon, rounding = name.partition(":")
    if colon:
        if rounding not in ROUNDINGS:
            raise ValueError(f"format {name!r}: {rounding!r}; allowed: {', '.join(ROUNDINGS)}")
        return replace(named_format(form), rounding=rounding)
    if name in FORMATS:
        return FORMATS[name]
    if not (match := _WIDTHS.fullmatch(name)):
        allowed = ", ".join(FORMATS)
        raise ValueError(
            f"format {name!r} is unknown; allowed: {allowed}, 1-E-M, 1-E-M+bias; "
            "with :even or :stochastic"
        )
    exponent_bits, mantissa_bits, bias = (int(number or 0) for number in match.groups())
    return FloatFormat(exponent_bits, mantissa_bits, bias)
