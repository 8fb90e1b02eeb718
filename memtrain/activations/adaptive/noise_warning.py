"""When the noise of compression is too much beside the gradient's own variance, and what to do."""

from collections.abc import Mapping, Sequence

from memtrain.activations.adaptive.bit_widths import Need

LOUD = 0.1
"""A share of the gradient's variance above which people are warned (GACT's bound)."""
_WORST = 3


def expected(need: Need, widths: Sequence[int]) -> float:
    """The variance that a site's widths bring.

    Args:
        need: Its samples' sensitivities, the variance at 1 bit of each.
        widths: Of its samples, most first; or of equal parts of them.

    Example:
        >>> expected(Need([1.0, 9.0], [8, 8]), (2, 1))
        2.0
    """
    shares = [1 / (2**b - 1) ** 2 for b in widths]
    if len(shares) == len(need.sensitivities):
        pairs = zip(sorted(need.sensitivities, reverse=True), shares, strict=True)
        return sum(c * share for c, share in pairs)
    return sum(need.sensitivities) * sum(shares) / len(shares)


def complaint(
    noise: Mapping[str, float], whole: float, of: str, advice: str, total: float | None = None
) -> str:
    """What a warning says, or an empty string where nothing is to be said.

    Args:
        noise: The variance that each site brings, in any unit.
        whole: What it is compared to, in the same unit.
        of: What that is.
        advice: What brings less.
        total: The variance of all sites together, where it is known; else their sum.

    Returns:
        The share of all sites together, the worst sites with theirs, and the advice.

    Example:
        >>> noise = {"a / linear / input": 1.0, "b / linear / input": 3.0}
        >>> complaint(noise, 16.0, "variance", "8 bits")
        "the saved activations' bits bring 25% of the gradient's variance as noise, most of it by
        b / linear / input (19%), a / linear / input (6%); 8 bits would bring less"
        >>> complaint({"a / linear / input": 1.0}, 16.0, "variance", "8 bits")
        ''
    """
    total = sum(noise.values()) if total is None else total
    if not total > LOUD * whole:  # nor where either is NaN
        return ""

    def share(value: float) -> str:
        return f"{value / whole:.0%}" if whole else "more than all"

    worst = sorted(noise, key=lambda site: -noise[site])[:_WORST]
    named = ", ".join(f"{site} ({share(noise[site])})" for site in worst)
    return (
        f"the saved activations' bits bring {share(total)} of the gradient's {of} as noise, most "
        f"of it by {named}; {advice} would bring less"
    )
