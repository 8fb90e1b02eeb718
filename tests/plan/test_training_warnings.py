"""What a plan asks for and a forward does not get is one warning, or an error where strict."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.b(nn.functional.gelu(self.a(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Net(nn.Module):
    """Two blocks, run as `how` says."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.h, self.how = nn.ModuleList([Block(), Block()]), how

    def forward(self, x):
        for block in self.h:
            if self.how.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.how.endswith("reentrant"))
            elif self.how == "custom Function":
                x = Doubled.apply(block(x).sin())
            else:
                x = block(x)
        return x


def run(how, model, x):
    if how == "torch.compile":
        torch.compiler.reset()
        return torch.compile(lambda x: model(x), backend="eager")(x)
    if how == "someone else's hooks":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return model(x)
    return model(x)


def step(how, cfg, steps=2, preset="balanced"):
    model = Net(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(model, optimizer, {"preset": preset, **cfg})
    for _ in range(steps):
        x = torch.randn(64, 64, requires_grad=True)
        run(how, model, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


CAUSES = {
    "torch.compile": r"the compiled forward: kept, it ran inside torch.compile.*; .*optimizer_only",
    "custom Function": r"kept (16|32).00 KiB, saved by a custom autograd Function; switch that",
    "someone else's hooks": r"\(root\).*saved-tensor hooks of someone else are on; turn them off",
}  # fmt: skip


@pytest.mark.parametrize("how", CAUSES)
def test_each_cause_is_reported_once_with_bytes_reason_and_remedy(how):
    with pytest.warns(RuntimeWarning, match=CAUSES[how]) as reported:
        step(how, {})
    assert len([one for one in reported if "strict" in str(one.message)]) == 1


def test_modules_in_a_compiled_graph_are_not_recomputed_and_reported():
    model = Net("plain")
    model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = memtrain.wrap(model, optimizer, "checkpointed")
    model(torch.randn(64, 64)).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"h.0 and 1 more: kept, its graph of torch.compile"):
        optimizer.step()


def _backward_and_step(loss, optimizer):
    loss.backward()
    optimizer.step()


# torch's compiler looks at the gradients of what it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("how", "preset"),
    [
        *((how, "all_four") for how in CAUSES),
        pytest.param("torch.compile", "balanced", marks=pytest.mark.nightly),
    ],
)
def test_strict_it_is_an_error_before_anything_is_changed(how, preset):
    model = Net(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cfg = {"preset": preset, "strict": True}
    model, optimizer = memtrain.wrap(model, optimizer, cfg)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        y = run(how, model, torch.randn(64, 64, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match=CAUSES[how]):
            _backward_and_step(y, optimizer)
        assert all(map(torch.equal, before, model.parameters()))
        assert not optimizer.state
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "cfg"),
    [
        ("plain", {}),
        ("plain", {"preset": "checkpointed"}),
        ("plain", {"activations": {"recompute": ["h.0"]}}),
        ("checkpoint", {}),
        ("checkpoint, reentrant", {}),
        ("checkpoint", {"preset": "exact"}),
        ("checkpoint", {"preset": "optimizer_only"}),
        pytest.param("torch.compile", {"preset": "optimizer_only"}, marks=pytest.mark.nightly),
        ("custom Function", {"preset": "fewbit3"}),
    ],
)
def test_what_was_not_asked_for_is_not_reported(how, cfg):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(how, {**cfg, "strict": True}, preset=cfg.get("preset", "balanced"))


def test_an_exception_that_matches_nothing_is_reported_once():
    rules = [{"op": "linaer"}, {"op": "gelu"}, {"module": "h.0.*", "tensor": "input"}]
    with pytest.warns(
        RuntimeWarning, match=r"no saved tensor .*: activations\.exceptions\.0: op=linaer;"
    ):
        step("plain", {"activations": {"exceptions": rules}}, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step("plain", {"activations": {"exceptions": rules[1:]}})


def test_a_step_without_a_forward_or_at_no_rate_is_not_the_first():
    model = Net("custom Function")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = memtrain.wrap(model, optimizer, ["strict=true"])
    model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="custom autograd Function"):
        optimizer.step()
