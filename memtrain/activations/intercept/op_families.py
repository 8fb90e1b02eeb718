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
acosh arccosh addcdiv cdist copysign cumprod digamma fmod hypot lgamma mvlgamma pdist polygamma prod
remainder sinc standard_gamma special_digamma special_entr special_gammaln special_log_ndtr
special_logit special_multigammaln special_polygamma special_psi special_sinc special_xlog1py
special_xlogy multi_margin_loss multilabel_margin_loss hinge_embedding_loss poisson_nll_loss
"""

# Where the backward solves by what is saved, or divides by differences of eigenvalues: noise is
# multiplied by the matrix's condition, and of a triangular factor the zeros come back as numbers.
_SOLVED = """
det logdet slogdet inverse pinverse cholesky cholesky_inverse cholesky_solve triangular_solve qr svd
lu lu_solve lu_unpack ormqr linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig
linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_norm
linalg_matrix_power linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
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
    "@singular": (*_SINGULAR.split(), *_SOLVED.split(), *_EXTREMAL.split()),
    # Their backward takes exp() of what they save, which turns noise into bias.
    "@exponential": ("cross_entropy", "log_softmax", "logsumexp"),
}
