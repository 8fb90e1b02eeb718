"""Families of ops that a rule may name at once, by how their backward uses what it saves."""

from memtrain.activations.calls import SMOOTH

_NONLINEAR = """
relu relu6 leaky_relu prelu rrelu elu celu selu gelu gelu_tanh quick_gelu silu mish sigmoid
logsigmoid tanh softplus softsign hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink
threshold clamp clip clamp_min clamp_max
"""

# One bit says all of their derivative.
_PIECEWISE = """
relu relu6 leaky_relu hardtanh hardsigmoid hardshrink softshrink threshold clamp clip clamp_min
clamp_max
"""

# Where the derivative jumps or is singular in what is saved (|x|, 1/x, log x), noise becomes bias.
_SINGULAR = """
abs clamp clip clamp_min clamp_max log log2 log10 log1p div true_divide truediv rtruediv rdiv
reciprocal sqrt rsqrt pow rpow norm vector_norm linalg_vector_norm normalize cosine_similarity
logit acos asin atanh arccos arcsin arctanh xlogy logaddexp
"""

FAMILIES: dict[str, tuple[str, ...]] = {
    "@nonlinear": tuple(_NONLINEAR.split()),
    "@smooth": SMOOTH,
    "@piecewise": tuple(_PIECEWISE.split()),
    "@singular": tuple(_SINGULAR.split()),
    # Their backward takes exp() of what they save, which turns noise into bias.
    "@exponential": ("cross_entropy", "log_softmax", "logsumexp"),
}
