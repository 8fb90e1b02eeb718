"""What torch's own tests promise of its optimizers, on torch's own inputs, of memtrain's."""

import copy
import io
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from memtrain import optim
from memtrain.optim.fused.payloads import real_view
from tests.optim.behaviours import ADAMS, FUSED
from tests.optim.torch_inputs import (
    NAMES,
    exact,
    give_gradients,
    infos,
    inputs,
    kind,
    make,
    parameters,
    plain,
)

every = pytest.mark.parametrize("name", NAMES)


class Refusal(NamedTuple):
    """Optimizers, behaviours and options that memtrain refuses, with the error and its reason."""

    names: str
    behaviours: str
    options: dict[str, Any]
    error: type[Exception]
    match: str

    def covers(self, name: str, behaviour: str, options: dict[str, Any]) -> bool:
        return (
            any(fnmatchcase(name, pattern) for pattern in self.names.split("|"))
            and any(fnmatchcase(behaviour, pattern) for pattern in self.behaviours.split("|"))
            and self.options.items() <= options.items()
        )


# torch's own fused kernel reads memory that nothing wrote
FUSED_SGD = {"fused": True, "momentum": 0.9}, ValueError, "random numbers; allowed there: fused=F"
HALVES = "steps-torch.bfloat16|steps-torch.float16"
REFUSALS = [
    Refusal("*(LBFGS)", "*", {}, TypeError, "history is one vector over all parameters"),
    Refusal("*(SparseAdam)", "*", {}, RuntimeError, "takes dense gradients only"),
    Refusal("Adam*bit*", "*", {"amsgrad": True}, ValueError, "running maximum has no fused kernel"),
    Refusal("CompressedOptimizer(SGD)", "state_dict-torch.bfloat16", *FUSED_SGD),
    Refusal("*(SGD)", HALVES, *FUSED_SGD),
    Refusal("*", "*", {"differentiable": True}, ValueError, "compressed states have no gradient"),
]
"""Every difference from torch's optimizers but an `eps` of 0 in float16 (test_half_precision.py);
docs/guides/optimizers.md lists the main ones. A listed case that works fails the suite."""


def each(behaviour, name, body, *flags):
    """Run `body` on the options of each of torch's inputs; refusals must be as they are listed."""
    for given in inputs(name, *flags):
        found = [r for r in REFUSALS if r.covers(name, behaviour, given.options)]
        try:
            if found:
                with pytest.raises(found[0].error, match=found[0].match):
                    body(dict(given.options))
            else:
                body(dict(given.options))
        except BaseException as error:
            error.add_note(f"{name}: {given.what}")
            raise


def steps(optimizer, name, *lists, count=3, first=0):
    for seed in range(first, first + count):
        give_gradients(name, *lists, seed=seed)
        optimizer.step()


def squares(name, optimizer, params):
    optimizer.zero_grad()
    loss = sum(p.square().sum() for p in params)
    loss.backward()
    if kind(name) == "SparseAdam":
        for p in params:
            p.grad = p.grad.to_sparse()
    return loss


def above_0(name, dtype, options):
    """The options, with an `eps` that is not 0 in float16, as torch's own is."""
    takes_eps = "eps" in signature(infos()[kind(name)].optim_cls).parameters
    if dtype != torch.float16 or not takes_eps or kind(name) == "Adafactor":
        return options
    return {**options, "eps": 0.1}


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@every
def test_steps_go_the_right_way(name):
    def body(options):
        for strided in (False, True):
            params = parameters(name)
            if strided:
                whole = [torch.stack([p.detach()] * 2, -1) for p in params]
                params = [nn.Parameter(w[..., 0]) for w in whole]
            optimizer = make(name, params, **options)
            start = squares(name, optimizer, params).item()
            for _ in range(4):
                optimizer.step(partial(squares, name, optimizer, params))
            end = squares(name, optimizer, params).item()
            assert end > start if options.get("maximize") else end < start

    each("steps", name, body)


@every
@pytest.mark.each_value
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_exact_states_make_torchs_steps(name, dtype):
    """Wrapped ones to the last bit; fused ones, whose arithmetic is their own, to its rounding."""

    def body(options):
        options = above_0(name, dtype, options)
        own, theirs = parameters(name, dtype), parameters(name, dtype)
        mine, torchs = exact(name, own, **options), plain(name, theirs, **options)
        for turn in range(7):
            give_gradients(name, own, theirs, seed=turn)
            if turn == 3:  # a step without gradients does nothing
                for param in (*own, *theirs):
                    param.grad = None
            mine.step()
            torchs.step()
        if name not in FUSED:
            assert_equal(own, theirs)
        elif dtype.itemsize > 2:
            torch.testing.assert_close(own, theirs)

    each(f"steps-{dtype}", name, body, "foreach", "fused")


@every
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_goes_on_exactly(name, dtype):
    def body(options):
        own = parameters(name, dtype)
        optimizer = make(name, [(f"p{i}", p) for i, p in enumerate(own)], **options)
        steps(optimizer, name, own)
        saved = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert_equal(loaded["state"], saved["state"])
        other = [nn.Parameter(p.detach().clone()) for p in own]
        late = make(name, other, **options)
        before = copy.deepcopy(loaded)
        late.load_state_dict(loaded)
        for turn in range(3, 6):
            give_gradients(name, own, other, seed=turn)
            optimizer.step()
            late.step()
        assert_equal(own, other)
        if name != "Lion":  # torch's own load_state_dict takes the tensors themselves
            assert_equal(loaded["state"], before["state"])
        assert_equal(late.state_dict()["state"], optimizer.state_dict()["state"])
        late.param_groups.extend(late.param_groups)
        groups = [o.state_dict()["param_groups"][-1] for o in (late, optimizer)]
        assert sorted(groups[0].items(), key=str) == sorted(groups[1].items(), key=str)
        assert groups[0]["param_names"] == [f"p{i}" for i in range(len(own))]

    each(f"state_dict-{dtype}", name, body, "fused")


@every
def test_older_state_dicts_lack_options_and_have_numbers_for_steps(name):
    def body(options):
        own = parameters(name)
        optimizer = make(name, own, **options)
        steps(optimizer, name, own)
        saved = copy.deepcopy(optim.portable_state_dict(optimizer))
        for group in saved["param_groups"]:
            for flag in infos()[kind(name)].not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].item()
        other = [nn.Parameter(p.detach().clone()) for p in own]
        late = make(name, other, **options)
        late.load_state_dict(saved)
        if not options.get("maximize"):  # an older one did not have it
            for turn in range(2):
                give_gradients(name, own, other, seed=9 + turn)
                optimizer.step()
                late.step()
            assert_equal(own, other)
        late.step()

    each("state_dict", name, body)


@every
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("form", [make, exact], ids=["packed", "exact"])
def test_a_state_dict_of_another_dtype_is_taken(name, dtype, form):
    def body(options):
        options = above_0(name, dtype, options)
        whole, other = parameters(name), parameters(name, dtype)
        for a, b in ((whole, other), (other, whole)):
            source, target = form(name, a, **options), form(name, b, **options)
            steps(source, name, a)
            target.load_state_dict(copy.deepcopy(source.state_dict()))
            steps(target, name, b, first=3)
            fresh = form(name, fresh_params := parameters(name, b[0].dtype), **options)
            steps(fresh, name, fresh_params, count=4)
            dtypes = [
                {k: v.dtype for k, v in o.state[ps[0]].items() if isinstance(v, torch.Tensor)}
                for o, ps in ((target, b), (fresh, fresh_params))
            ]
            assert dtypes[0] == dtypes[1]
            assert all(p.isfinite().all() for p in b)

    each("state_dict", name, body)


@every
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_default_dtype_of_float64(name, dtype):
    def body(options):
        own, theirs = parameters(name, dtype), parameters(name, dtype)
        packed = parameters(name, dtype)
        mine, torchs = exact(name, own, **options), plain(name, theirs, **options)
        compressed = make(name, packed, **options)
        start = copy.deepcopy(packed)
        for turn in range(3):
            give_gradients(name, own, theirs, packed, seed=turn)
            mine.step()
            torchs.step()
            compressed.step()
        torch.testing.assert_close(own, theirs)
        assert all(not torch.equal(a, b) for a, b in zip(packed, start, strict=True))
        for optimizer, params in ((mine, own), (compressed, packed)):
            counters = optimizer.state[params[0]].get("step"), torchs.state[theirs[0]].get("step")
            dtypes = [getattr(counter, "dtype", None) for counter in counters]
            assert dtypes[0] == dtypes[1]

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        each("default_dtype", name, body)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if kind(n) not in ("Adafactor", "Muon", "SparseAdam")]
)
def test_complex_parameters_are_pairs_of_real_ones(name):
    def body(options):
        own = [*parameters(name, torch.complex64), *parameters(name, seed=1)]
        pairs = [nn.Parameter(real_view(p.detach()).clone()) for p in own]
        mine, theirs = exact(name, own, **options), exact(name, pairs, **options)
        packed = [nn.Parameter(p.detach().clone()) for p in own]
        compressed = make(name, packed, **options)
        for turn in range(3):
            give_gradients(name, own, packed, seed=turn)
            for param, pair in zip(own, pairs, strict=True):
                pair.grad = real_view(param.grad).clone()
            for optimizer in (mine, theirs, compressed):
                optimizer.step()
        for param, other, pair in zip(own, packed, pairs, strict=True):
            if param.is_complex():  # in another order of a sum
                torch.testing.assert_close(torch.view_as_real(param.detach()), pair.detach())
                torch.testing.assert_close(other, param)
        late = make(name, copy.deepcopy(packed), **options)
        late.load_state_dict(compressed.state_dict())
        assert_equal(late.state_dict()["state"], compressed.state_dict()["state"])

    each("complex", name, body)


@every
def test_a_learning_rate_may_be_a_tensor(name):
    def body(options):
        own, other = parameters(name), parameters(name)
        mine = make(name, own, **{**options, "lr": 0.01})
        late = make(name, other, **{**options, "lr": torch.tensor(0.01, dtype=torch.float64)})
        for turn in range(2):
            give_gradients(name, own, other, seed=turn)
            mine.step()
            late.step()
        torch.testing.assert_close(own, other)

    each("tensor_lr", name, body)


@every
def test_no_gradient_and_a_gradient_of_zero(name):
    def body(options):
        own = parameters(name)
        optimizer = make(name, own, **options)
        start = copy.deepcopy(own)
        if kind(name) == "SparseAdam":
            give_gradients(name, own)
        before = copy.copy(optimizer.state)  # Adagrad's are there from the start
        optimizer.step()
        assert_equal(own, start)
        assert optimizer.state == before
        if "weight_decay" in options or kind(name) in ("AdamW", "ASGD", "Muon"):
            return  # these decay by default
        for param in own:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        torch.testing.assert_close(own, start)

    each("steps", name, body)


@pytest.mark.parametrize("name", [n for n in NAMES if kind(n) != "LBFGS"])  # it has one group
def test_groups_have_their_own_options_and_schedules(name):
    def body(options):
        info = infos()[kind(name)]
        for make_schedules in info.scheduler_inputs[:3]:
            own, alone = parameters(name), parameters(name)
            twice = [{"params": own[:1], "lr": 0.02}, {"params": parameters(name)[:1]}]
            optimizer = make(name, twice, **options)
            single = make(name, [{"params": alone[:1], "lr": 0.02}], **options)
            schedules = [[s(o) for s in make_schedules] for o in (optimizer, single)]
            for turn in range(3):
                give_gradients(name, own[:1], alone[:1], twice[1]["params"], seed=turn)
                for o, scheduled in zip((optimizer, single), schedules, strict=True):
                    o.step()
                    for schedule in scheduled:
                        late = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
                        schedule.step(1.0) if late else schedule.step()
            assert_equal(own[:1], alone[:1])

    each("groups", name, body)


@pytest.mark.parametrize("adam", ["Adam8bit", "compress(Adam)", "CompressedOptimizer(Adam)"])
@pytest.mark.parametrize("adamw", ["AdamW4bit", "AdamW8bitFactor", "CompressedOptimizer(AdamW)"])
def test_whose_weight_decay_is_decoupled(adam, adamw):
    def of(name, params):
        return exact(name, params) if name.startswith("Comp") else make(name, params)

    own = parameters("AdamW4bit")
    w, plain_adam = of(adamw, own), of(adam, own)
    from_w = w.state_dict()
    plain_adam.load_state_dict(from_w)
    assert plain_adam.param_groups[0]["decoupled_weight_decay"] is True
    w.load_state_dict(of(adam, own).state_dict())
    assert w.param_groups[0]["decoupled_weight_decay"] is True
    del from_w["param_groups"][0]["decoupled_weight_decay"]
    w.load_state_dict(from_w)
    assert w.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("name", ADAMS)
def test_an_option_that_says_adam_is_kept(name):
    own = parameters(name)
    adam = make(name, own, decoupled_weight_decay=False)
    adam.load_state_dict(adam.state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is False


def test_every_optimizer_of_torchs_list_is_here():
    classes = {info.optim_cls.__name__ for info in infos().values()} - {"Lion"}
    assert {kind(name) for name in NAMES if name.startswith("compress(")} == classes
    assert all(name in NAMES for name in optim.__all__ if name.endswith(("bit", "bitFactor")))
