"""The warning of too much quantisation noise in a gradient."""

from collections.abc import Mapping

THRESHOLD = 0.1
"""A share of the gradient's variance above which a warning is due (GACT's bound)."""
_WORST = 3


def noise_warning(
    noise: Mapping[str, float],
    reference: float,
    name: str,
    remedy: str,
    total: float,
) -> str:
    """Word the warning of too much quantisation noise; empty where there is little.

    The noise of a site is the variance that it adds to the gradient, and `total` that of all sites.
    `reference`, in the same unit, is the variance or norm that it is compared to: the gradient's
    `name`. `remedy` is a change that lowers the noise.

    Example:
        >>> noise = {"a / linear / input": 1.0, "b / linear / input": 3.0}
        >>> noise_warning(noise, 16.0, "variance", "8 bits", 4.0)
        "quantisation noise of the saved activations is 25% of the gradient's variance, most of it
        from b / linear / input (19%), a / linear / input (6%); 8 bits would lower it"
        >>> noise_warning({"a / linear / input": 1.0}, 16.0, "variance", "8 bits", 1.0)
        ''
    """
    if not total > THRESHOLD * reference:  # nor where either is NaN
        return ""

    def share(value: float) -> str:
        return f"{value / reference:.0%}" if reference else "more than 100%"

    worst = sorted(noise, key=lambda site: -noise[site])[:_WORST]
    named = ", ".join(f"{site} ({share(noise[site])})" for site in worst)
    return (
        f"quantisation noise of the saved activations is {share(total)} of the gradient's {name}, "
        f"most of it from {named}; {remedy} would lower it"
    )
