"""A random model beside the baseline: three training steps, and what must hold of them."""

import copy
import random
import threading
import warnings
from functools import cache

import torch
from torch._C._autograd import _get_sequence_nr

import memtrain
from memtrain.config.sources import load
from tests.activations.proof.comparison import all_same, config, flat
from tests.activations.proof.fuzz_models import Random
from tests.activations.proof.fuzz_ops import ROWS, WIDTH

STEPS = 3
GROUP = 128
WIDER = 4
"""How much further than the counterpart's a gradient may be: what one payload gives to several ops
is off in the same direction in all of them, where the counterpart draws for each."""


@cache
def eight_bits():
    """`balanced` with the rules at 8 bits, whose errors are small."""
    return load(
        {
            "preset": "activations_only",
            "gradients": "keep",
            "activations": {
                "min_elements": 0,
                "rules": [
                    {"op": "@nonlinear", "compressor": {"name": "derivative", "bits": 8}},
                    {"compressor": {"name": "group", "bits": 8, "group_size": GROUP}},
                ],
            },
        }
    )


class InGroups:
    """Saved-tensor hooks that round every tensor in groups: an independent counterpart.

    Args:
        bits: Per element.
        seed: Of the stochastic rounding.
        own: Tensors that are kept: parameters.
    """

    def __init__(self, bits, seed, own):
        self.steps, self.generator = 2**bits - 1, torch.Generator().manual_seed(seed)
        self.own = {p.untyped_storage().data_ptr() for p in own}

    def pack(self, x):
        if not x.is_floating_point() or x.untyped_storage().data_ptr() in self.own:
            return x
        flat = x.detach().float().flatten()
        padded = torch.cat([flat, flat[-1:].expand(-flat.numel() % GROUP)]).view(-1, GROUP)
        low, high = padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)
        step = ((high - low) / self.steps).clamp(min=torch.finfo(torch.float32).tiny)
        drawn = torch.rand(padded.shape, generator=self.generator)
        rounded = ((padded - low) / step + drawn).floor().clamp(max=self.steps) * step + low
        rounded = torch.where(padded.isfinite() & rounded.isfinite(), rounded, padded)
        return rounded.flatten()[: flat.numel()].view(x.shape).to(x.dtype)

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)
        self.hooks.__enter__()

    def __exit__(self, *args):
        self.hooks.__exit__(*args)


class Training:
    """Three steps of a model; how each goes is drawn from the seed.

    Args:
        model: A `Random`.
        seed: Draws inputs and how each step goes.
        around: Called for a context around each forward.
    """

    def __init__(self, model, seed, around=None):
        self.model, self.seed, self.around = model, seed, around

    def results(self):
        """Of each step: values and gradients, or the error."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [self._step(now) for now in range(STEPS)]

    def _forward(self, now, x):
        torch.manual_seed(self.seed + now)
        if self.around is None:
            return self.model(x, now)
        with self.around():
            return self.model(x, now)

    def _step(self, now):
        rng = random.Random(self.seed * 10 + now)
        generator = torch.Generator().manual_seed(self.seed * 10 + now)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        weight = torch.randn(ROWS, WIDTH, generator=generator)
        x.requires_grad_(rng.random() < 0.3)
        how = rng.choice(("plain", "plain", "dropped", "twice", "retained", "thread", "scaled"))
        parameters = list(self.model.parameters())
        try:
            if how == "dropped":
                self._forward(now, x)
            outputs = [self._forward(now, x)]
            if how == "twice":
                outputs.append(self._forward(now + 1, x * 0.5))
            if how == "scaled":  # unseen by the version counter
                parameters[0].data.mul_(1.25)
            values = [y.detach().clone() for y in outputs]
            loss = sum((y * weight).sum() for y in outputs)
            grads = self._grads(loss, parameters + [x] * x.requires_grad, how)
        except Exception as error:  # noqa: BLE001 - compared with the baseline's
            return error
        finally:
            with torch.no_grad():
                for p in parameters:  # a step of the optimizer: the same for all, also after errors
                    p.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
        return values, grads

    def _grads(self, loss, of, how):
        def compute(**options):
            return torch.autograd.grad(loss, of, allow_unused=True, **options)

        if how == "retained":
            compute(retain_graph=True)
        if how != "thread":
            return [torch.zeros(()) if g is None else g for g in compute()]
        out = []

        def work():
            try:
                out.append(compute())
            except Exception as error:  # noqa: BLE001 - handed on
                out.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(out[0], Exception):
            raise out[0]
        return [torch.zeros(()) if g is None else g for g in out[0]]


def _wrapped(model, cfg):
    model = copy.deepcopy(model)
    return memtrain.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), cfg)[0]


def failure(program, seed):
    """What is wrong with the wrapped model of a program; empty where nothing is."""
    while _get_sequence_nr() < 10_000:
        # Autograd numbers a thread's nodes from 0. Where the main thread's are no larger, gradients
        # add up in another order, also in PyTorch alone: in the first model of a process.
        torch.ones(1, requires_grad=True).neg()
    torch.manual_seed(seed)
    model = Random(program)
    baseline = Training(copy.deepcopy(model), seed).results()
    return (
        _exact(model, seed, baseline)
        or _finite(model, seed, baseline)
        or _near(model, seed, baseline)
    )


def _exact(model, seed, baseline):
    mine = Training(_wrapped(model, config("exact", 0)), seed).results()
    for i, (a, b) in enumerate(zip(mine, baseline, strict=True)):
        if isinstance(a, Exception) or isinstance(b, Exception):
            if type(a) is not type(b):
                return f"exact: step {i} ends with {_named(a)}, the baseline's with {_named(b)}"
        elif not all_same(a[0], b[0]):
            return f"exact: step {i} has another value"
        elif not all_same(a[1], b[1]):
            return f"exact: step {i} has another gradient"
    return ""


def _named(result):
    return repr(result)[:200] if isinstance(result, Exception) else "gradients"


def _finite(model, seed, baseline):
    mine = Training(_wrapped(model, config("balanced", 0)), seed).results()
    for i, (a, b) in enumerate(zip(mine, baseline, strict=True)):
        if isinstance(b, Exception):
            continue
        if isinstance(a, Exception):
            return f"balanced: step {i} ends with {_named(a)}, the baseline's with gradients"
        if not all_same(a[0], b[0]):
            return f"balanced: step {i} has another value"
        if bool((flat(b[1]).isfinite() & ~flat(a[1]).isfinite()).any()):
            return f"balanced: step {i} has a gradient that is not finite"
    return ""


def _near(model, seed, baseline):
    """At 8 bits, no further from the exact gradient than the counterpart with the same bits."""
    mine = Training(_wrapped(model, eight_bits()), seed).results()
    for draws in (4, 32):
        spread = [_rounded(model, seed, draw) for draw in range(draws)]
        found = ""
        for i, (a, b) in enumerate(zip(mine, baseline, strict=True)):
            if isinstance(a, Exception) or isinstance(b, Exception):
                continue
            if not all_same(a[0], b[0]):
                return f"near: step {i} has another value"
            others = [each[i] for each in spread if not isinstance(each[i], Exception)]
            exact = flat(b[1])
            ok = exact.isfinite()
            error = float((flat(a[1]) - exact)[ok].norm())
            most = max(
                [float((flat(o[1]) - exact)[ok].norm()) for o in others], default=float("inf")
            )
            rounding = 1e-5 * float(exact[ok].norm())
            if error > WIDER * most + rounding:
                norm = float(exact[ok].norm())
                found = f"near: step {i} is {error:.3g} off, at most {most:.3g} due, of {norm:.3g}"
                break
        if not found:
            return ""
    return found


def _rounded(model, seed, draw):
    model = copy.deepcopy(model)
    hooks = iter(range(1000 * draw, 1000 * draw + 1000))
    return Training(model, seed, lambda: InGroups(8, next(hooks), model.parameters())).results()
