"""Families of ops that a rule may name at once."""

_NONLINEAR = """
relu relu6 leaky_relu elu celu selu gelu gelu_tanh quick_gelu silu mish sigmoid
logsigmoid tanh softplus softsign hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink
threshold clamp clip clamp_min clamp_max
"""

# One bit says all of their derivative.
_PIECEWISE = """
relu relu6 leaky_relu hardtanh hardsigmoid hardshrink softshrink threshold clamp clip clamp_min
clamp_max
"""

FAMILIES: dict[str, tuple[str, ...]] = {
    "@nonlinear": tuple(_NONLINEAR.split()),
    "@smooth": ("gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "softplus", "logsigmoid"),
    "@piecewise": tuple(_PIECEWISE.split()),
    # Probabilities and scales: models take their logarithm, or divide by them, which multiplies the
    # error of a coarse derivative where the derivative is near 0.
    "@saturating": ("sigmoid", "tanh", "softplus", "softsign", "logsigmoid", "hardsigmoid"),
    # Their backward takes exp() of what they save, which turns noise into bias.
    "@exponential": ("cross_entropy", "log_softmax"),
}
