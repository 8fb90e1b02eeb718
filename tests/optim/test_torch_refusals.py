"""What memtrain's optimizers refuse: what torch's do, in its words, and two options by name."""

import copy

import pytest
import torch
from torch import nn

from memtrain.optim import compress
from tests.optim.behaviours import FUSED
from tests.optim.torch_inputs import NAMES, give_gradients, infos, kind, make, parameters, plain

every = pytest.mark.parametrize("name", NAMES)

TAKEN = {
    "lr as a Tensor is not supported for capturable=False and foreach=True",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
    "betas must be either both floats or both Tensors",
}
"""What torch refuses and the fused optimizers take: `foreach` means nothing there, and each number
of a step is read by itself."""


def knows(name, option):
    """Whether torch's optimizer has an option."""
    info = infos()[kind(name)]
    if option == "differentiable":
        return option in info.supported_impls
    return any(one.kwargs.get(option) for one in info.optim_inputs_func("cuda"))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "Lion" and kind(n) != "LBFGS"])
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("differentiable", "compressed states have no gradient"),
        ("capturable", "call step outside; allowed: capturable=False"),
        ("amsgrad", "bit.* has no amsgrad: its running maximum has no fused kernel"),
    ],
)
def test_an_option_is_refused_whatever_brings_it(name, option, why):
    """A constructor, a torch optimizer, a group, a checkpoint, or a changed group."""
    if not knows(name, option) or (option == "amsgrad" and name not in FUSED):
        return
    own, refused = parameters(name), pytest.raises(ValueError, match=why)
    if kind(name) != "Lion":
        with refused:
            make(name, own, **{option: True})
    if name not in FUSED:
        before = plain(name, own, **{option: True})
        with refused:
            compress(before)
        assert "step" not in vars(before)
    optimizer, start = make(name, own), copy.deepcopy(own)
    with refused:
        optimizer.add_param_group({"params": parameters(name), option: True})
    assert len(optimizer.param_groups) == 1
    saved, states = copy.deepcopy(optimizer.state_dict()), copy.copy(optimizer.state)
    saved["param_groups"][0].update({option: True, "lr": 7.0})
    with refused:
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] != 7.0
    give_gradients(name, own)
    optimizer.param_groups[0][option] = True
    with refused:
        optimizer.step()
    torch.testing.assert_close(own, start, rtol=0, atol=0)
    assert optimizer.state == states


@every
def test_errors_are_those_of_torch(name):
    info = infos()[kind(name)]
    for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        case = given.optimizer_error_input
        params = parameters(name) if case.params is None else case.params
        try:
            if name in FUSED and given.error_regex in TAKEN:
                optimizer = make(name, params, **case.kwargs)
                give_gradients(name, params)
                optimizer.step()
            elif issubclass(given.error_type, Warning):
                if kind(name) != "LBFGS":
                    with pytest.warns(given.error_type, match=given.error_regex):
                        make(name, params, **case.kwargs)
            else:
                with pytest.raises(given.error_type, match=given.error_regex):
                    make(name, params, **case.kwargs).step()
        except BaseException as error:
            error.add_note(f"{name}: {case.desc}")
            raise


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n in FUSED or "fused" in infos()[kind(n)].supported_impls]
)
def test_parameters_without_data_are_an_error(name):
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    optimizer = make(name, model.parameters(), **({} if kind(name) == "Lion" else {"fused": True}))
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    before = copy.copy(optimizer.state)  # Adagrad's are there from the start
    with pytest.raises(RuntimeError, match="requires all the params to"):
        optimizer.step()
    assert optimizer.state == before


@pytest.mark.parametrize("name", [n for n in NAMES if n != "Lion" and kind(n) != "LBFGS"])
def test_a_captured_step_is_refused(name, monkeypatch):
    own = parameters(name)
    optimizer, start = make(name, own), copy.deepcopy(own)
    give_gradients(name, own)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="can't be captured in a CUDA graph"):
        optimizer.step()
    torch.testing.assert_close(own, start, rtol=0, atol=0)
