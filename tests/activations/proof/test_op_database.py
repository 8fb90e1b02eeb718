"""Every op and module of torch's own database that has a gradient, wrapped, beside the baseline.

Four forwards in a row differ in their arguments, and in as little else as the database allows. The
tensors are leaves, or results of another op. Under `exact` gradients are equal to the bit, or the
error is the same. Under `balanced`, from the smallest tensor on, no gradient is NaN that was a
number, and gradients are equal to the bit for what memtrain does not know; for what it knows the
mean over draws is the exact gradient, within its confidence interval.

CI runs a fixed share, and what was once reported; the nightly run all.
"""

import copy
import math
import re
from collections import Counter
from functools import partial

import pytest
import torch

from memtrain.compressors.fewbit.functions import FAMILIES
from tests.activations.proof.comparison import (
    Holder,
    Verdict,
    all_same,
    config,
    flat,
    judge,
    step,
    wrapped,
)
from tests.activations.proof.op_samples import (
    GROWING,
    enlarged,
    forms_of,
    full_name,
    module_steps,
    modules,
    ops,
    steps_of,
)

pytestmark = [
    # torch's own, of its database's arguments
    pytest.mark.filterwarnings("ignore:.*(beta state|deprecated|nested_tensor):UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(new feature|should be replaced):UserWarning"),
]
STEPS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
SHARE = 40
"""Of the cases, CI runs one in so many."""
REPORTED = re.findall(
    r"\S+",
    """true_divide amax amin remainder fmod pow float_power xlogy special.xlog1py logaddexp
    logaddexp2 hypot atan2 ldexp copysign lerp addcdiv grid_sampler_2d grid_sampler_3d
    renorm linalg.solve linalg.solve_triangular linalg.inv linalg.cholesky linalg.qr
    linalg.householder_product linalg.svdvals linalg.eigvalsh linalg.det linalg.slogdet
    logdet linalg.pinv matrix_exp cumprod logcumsumexp prod std linalg.vector_norm
    linalg.matrix_norm logsumexp cdist polygamma.polygamma_n_1 mvlgamma.mvlgamma_p_3
    max.reduction_with_dim maximum fmin scatter_reduce.amax linalg.lu_factor angle norm stft
    einsum tensordot clamp softmax log_softmax sum where nn.functional.binary_cross_entropy
    nn.functional.ctc_loss nn.functional.normalize nn.functional.l1_loss
    nn.functional.poisson_nll_loss nn.functional.cosine_similarity
    nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss
    nn.functional.gaussian_nll_loss nn.functional.local_response_norm nn.functional.softsign
    nn.functional.tanhshrink nn.functional.multilabel_soft_margin_loss
    nn.functional.bilinear nn.functional.pairwise_distance nn.functional.interpolate.bicubic
    nn.functional.huber_loss nn.functional.kl_div nn.functional.glu
    nn.functional.scaled_dot_product_attention nn.functional.gelu nn.functional.leaky_relu
    nn.functional.elu nn.functional.softplus nn.functional.hardtanh nn.functional.layer_norm
    nn.functional.group_norm nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.conv2d nn.functional.cross_entropy""",
)
"""Ops whose gradients were once wrong, some after other arguments: CI runs them all."""


def cases(found, share, forms=lambda each: ("function",), reported=()):
    """One case for each op, dtype and form; all but one in `share` and `reported` are nightly."""
    own, number = [], 0
    always = {(torch.float32, "function", name) for name in reported}
    for i, dtype in enumerate(DTYPES):
        for j, each in enumerate(found(dtype)):
            for form in forms(each):
                number += 1
                late = (i + j) % share if form == "function" else 1
                late = late and (dtype, form, full_name(each)) not in always
                name = f"{str(dtype)[6:]}-{full_name(each)}-{form}"
                marks = [pytest.mark.nightly] * bool(late)
                own.append(pytest.param(each, dtype, form, id=name, marks=marks))
    return own


def rounding_of(call, inner, exact, dtype):
    """The norm of what rounding may leave of the gradient, of a kernel in another order.

    Twice the baseline's own error, and what one unit in the last place of every input moves the
    gradient by, both from the same call in double precision, where the op takes that. At least four
    roundings of each term, which cancel in what is left: products of the result's gradient and the
    largest argument.
    """
    eps = torch.finfo(dtype).eps
    sizes = [x.detach().abs().max() for x in call.tensors if x.is_floating_point() and x.numel()]
    largest = max([1.0, *(float(x) for x in sizes if x.isfinite())])
    own = 4 * eps * max(float(exact[exact.isfinite()].norm()), 1.5 * largest)
    if call.function is None:
        return own
    wide = call.to(torch.complex128 if dtype.is_complex else torch.float64)
    truth, moved = (_gradient(each, inner) for each in (wide, wide.moved(eps)))
    if truth is None or moved is None or not len(truth) == len(moved) == len(exact):
        return own
    error = 2 * float((truth - exact).norm()) + 2 * float((truth - moved).norm())
    return max(own, error) if math.isfinite(error) else own


def _gradient(call, inner):
    run, leaves = call.fresh(inner)
    found = step(lambda: run(None), leaves)
    return None if found.error or not found.grads else flat(found.grads)


def slack_of(name, call, baseline, dtype):
    """Half of the range of f', times the gradient of the result: no code of f' is further off.

    None for what is no pointwise nonlinearity, whose gradient takes no code.
    """
    if name not in FAMILIES or not dtype.is_floating_point:
        return None
    x = torch.linspace(-20, 20, 4001).requires_grad_()
    y = call.function(x * 1, *call.to(torch.float32).args[1:], **call.kwargs)
    (slopes,) = torch.autograd.grad(y.sum(), x)
    (grads,) = baseline.grads
    weights = 1.5  # the largest of `comparison.weights`
    rounding = 4 * torch.finfo(dtype).eps * grads.abs().max()
    return float((slopes.max() - slopes.min()) / 2 * weights + rounding)


def compare(call, model, mine, inner, dtype, name):
    """The verdict on one step, and None where the step shows nothing; `name`: of the op."""

    def result(which):
        run, leaves = call.fresh(inner)
        if call.function is None:
            leaves += [p for p in which.own[call.number].parameters() if p.requires_grad]
        return step(lambda: which(run), leaves)

    baseline, repeated = result(model), result(model)
    if not all_same(baseline.values + baseline.grads, repeated.values + repeated.grads):
        return None  # torch's own result differs from run to run
    if not baseline.error and not baseline.grads:
        return None
    first = result(mine)
    rounding, slack = 0.0, None
    if not baseline.error and not all_same(first.grads, baseline.grads):
        rounding = rounding_of(call, inner, flat(baseline.grads), dtype)
        plain = call if call.function else call._replace(function=model.own[call.number])
        slack = slack_of(name, plain, baseline, dtype)
    verdict = judge(baseline, first, lambda: result(mine), rounding, slack)
    if verdict.kind == "another value":  # LAPACK's may differ by where in memory its inputs lie
        again = [result(model) for _ in range(8)]
        if not all(all_same(baseline.values, one.values) for one in again):
            return None
    return verdict


def check(verdicts, record_property):
    """Report the counts; fail with every verdict that is wrong."""
    counts = Counter(v.kind if v else "shows nothing" for v in verdicts.values())
    record_property("op database", dict(counts))
    wrong = {place: v for place, v in verdicts.items() if v and not v.right}
    assert not wrong, "\n".join(f"{place}: {v.kind} {v.detail}" for place, v in wrong.items())


def strict(verdicts, preset):
    """Under `exact`, what is right on average is wrong."""
    if preset != "exact":
        return verdicts
    exact = ("equal", "error")
    return {
        place: v
        if v is None or v.kind in exact or not v.right
        else Verdict(f"only {v.kind}", v.detail)
        for place, v in verdicts.items()
    }


def largest_accepted(call, model, inner):
    """The call with large tensors, as the op takes them; None where it takes none."""
    for large in enlarged(call):
        run, leaves = large.fresh(inner)
        if step(partial(model, run), leaves).error is None:
            return large
    return None


def verdicts_of(op, dtype, form, preset):
    calls, name = steps_of(op, dtype, STEPS, form), op.name.split(".")[-1]
    verdicts = {}
    for inner in (False, True):
        model, mine = Holder(), wrapped(Holder(), preset, 0)
        steps = [(i, "small", call) for i, call in enumerate(calls)]
        if preset != "exact" and op.name not in GROWING:
            steps += [(i, "large", largest_accepted(c, model, inner)) for i, c in enumerate(calls)]
        for i, size, call in steps:
            where = f"step {i}, {size}, {'inner' if inner else 'leaf'}"
            verdicts[where] = compare(call, model, mine, inner, dtype, name) if call else None
    return strict(verdicts, preset)


@pytest.mark.parametrize(("op", "dtype", "form"), cases(ops, SHARE, forms_of))
def test_an_op_is_exact_under_exact(op, dtype, form, record_property):
    check(verdicts_of(op, dtype, form, "exact"), record_property)


@pytest.mark.parametrize(("op", "dtype", "form"), cases(ops, SHARE, forms_of, REPORTED))
def test_an_op_is_right_under_balanced(op, dtype, form, record_property):
    check(verdicts_of(op, dtype, form, "balanced"), record_property)


NO_CODES = config.__wrapped__(
    "balanced", 0, exceptions=[{"op": "@nonlinear", "compressor": "keep"}]
)


def verdicts_of_module(info, dtype, preset):
    verdicts, name = {}, info.module_cls.__name__.lower()
    for training in (True, False):
        own, calls = module_steps(info, dtype, STEPS, training)
        for inner in (False, True):
            model, mine = Holder(own), wrapped(Holder(copy.deepcopy(own)), preset, 0)
            for i, call in enumerate(calls):
                where = f"step {i}, {'inner' if inner else 'leaf'}, training {training}"
                found = compare(call, model, mine, inner, dtype, name)
                if found and found.kind == "biased":  # by its nonlinearity's codes alone?
                    rest = wrapped(Holder(copy.deepcopy(own)), "", cfg=NO_CODES)
                    if compare(call, model, rest, inner, dtype, name).right:
                        found = found._replace(kind="code")
                verdicts[where] = found
    return strict(verdicts, preset)


@pytest.mark.parametrize(("info", "dtype", "form"), cases(modules, SHARE))
def test_a_module_is_exact_under_exact(info, dtype, form, record_property):
    check(verdicts_of_module(info, dtype, "exact"), record_property)


@pytest.mark.parametrize(("info", "dtype", "form"), cases(modules, SHARE))
def test_a_module_is_right_under_balanced(info, dtype, form, record_property):
    check(verdicts_of_module(info, dtype, "balanced"), record_property)
