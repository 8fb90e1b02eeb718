"""Families of ops that a rule may name at once, by how their backward uses what it saves."""

from memtrain.activations.intercept.replaced_ops import SMOOTH

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
logit acos asin atanh arccos arcsin arctanh xlogy logaddexp logcumsumexp erfinv atan2 arctan2
l1_loss smooth_l1_loss huber_loss margin_ranking_loss triplet_margin_loss pairwise_distance
binary_cross_entropy gaussian_nll_loss ctc_loss grid_sample
"""

# Where the backward asks which element equals the result: of noisy ones none does (NaN, or 0).
_EXTREMAL = """
max min amax amin aminmax maximum minimum fmax fmin median nanmedian scatter_reduce index_reduce
segment_reduce
"""

FAMILIES: dict[str, tuple[str, ...]] = {
    "@nonlinear": tuple(_NONLINEAR.split()),
    "@smooth": SMOOTH,
    "@piecewise": tuple(_PIECEWISE.split()),
    "@singular": (*_SINGULAR.split(), *_EXTREMAL.split()),
    # Their backward takes exp() of what they save, which turns noise into bias.
    "@exponential": ("cross_entropy", "log_softmax", "logsumexp"),
}
