"""Inputs and uses that nobody plans for, through `memtrain.wrap`, with every preset."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.compressors import DerivativeCode, Group, Identity
from tests.activations.intercept.intercepted import intercept
from tests.activations.proof.comparison import in_thread

PRESETS = ("balanced", "smallest", "fewbit3", "actnn_l2", "gact4", "patch4x4")
CORE = PRESETS[:2]  # of every run; the others take minutes together
every_preset = pytest.mark.parametrize(
    "preset", [*CORE, *(pytest.param(name, marks=pytest.mark.nightly) for name in PRESETS[2:])]
)


class Net(nn.Module):
    """Convolution, batch norm, pooling, layer norm, attention's softmax, a gate, dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.mix = nn.Linear(8, 24)
        self.layer_norm = nn.LayerNorm(24)
        self.out = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.conv(x))))
        x = self.layer_norm(self.mix(x.flatten(2).transpose(1, 2)))
        q, k, v = F.gelu(x).chunk(3, -1)
        x = torch.softmax(q @ k.transpose(1, 2) / 3, -1) @ (v * torch.sigmoid(k))
        return self.out(self.drop(x)).mean(1)


def wrapped(preset, model=None, lr=1e-2):
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return memtrain.wrap(model, optimizer, preset)


def assert_as_near(y, plain, net, x, seed=None):
    """`y` is at most twice as far from `net`'s value in float64 as `plain`, PyTorch's own, is."""
    if seed is not None:
        torch.manual_seed(seed)
    wide = copy.deepcopy(net).double()(x.double()).detach()
    assert (y.double() - wide).norm() <= 2 * (plain.double() - wide).norm()


def images(n=4, size=16):
    return torch.randn(n, 3, size, size)


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- shapes and strides -----------------------------------------------------------------------

LAYOUTS = {
    "non-contiguous": lambda: images(4, 32)[:, :, ::2, ::2],
    "transposed": lambda: images().transpose(2, 3),
    "channels-last": lambda: images().contiguous(memory_format=torch.channels_last),
    "expanded": lambda: images(1).expand(4, -1, -1, -1),
    "one value": lambda: torch.ones(()).expand(4, 3, 16, 16),
    "overlapping": lambda: torch.randn(4, 3, 16, 20).unfold(3, 16, 1)[:, :, :, 2],
    "denormal": lambda: images() * 1e-41,
    "constant": lambda: torch.full((4, 3, 16, 16), 0.7),
    "empty batch": lambda: images(0),
    "one": lambda: images(1, 2),
}


@every_preset
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_plain_loss_and_finite_gradients(preset, layout):
    torch.manual_seed(1)
    x = LAYOUTS[layout]()
    plain = Net().eval() if layout in ("empty batch", "one") else Net()
    before = copy.deepcopy(plain)
    model, _ = wrapped(preset, copy.deepcopy(plain))
    results = []
    for net in (plain, model):
        torch.manual_seed(2)
        y = net(x)
        y.square().sum().backward()
        results.append((y.detach(), gradients(net)))
    (y, grads), (y2, grads2) = results
    assert_as_near(y2, y, before, x, seed=2)
    assert len(grads) == len(grads2)
    assert all(
        g.isfinite().all() and g.shape == h.shape for g, h in zip(grads2, grads, strict=True)
    )
    if layout == "empty batch":
        assert all(torch.equal(g, h) for g, h in zip(grads, grads2, strict=True))


class Scalars(nn.Module):
    """Every op that `wrap` knows best, on whatever shape comes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        x = F.gelu(x * self.w)
        x = F.dropout(F.silu(x * x), 0.0) * torch.sigmoid(x)
        return F.relu(x.exp() - self.w).sum()


@every_preset
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (1, 1, 1, 1), (1, 0, 4, 4)])
@pytest.mark.parametrize("min_elements", [1, 1024])
def test_tensors_of_next_to_nothing(preset, shape, min_elements):
    model = Scalars()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = memtrain.wrap(
        model, optimizer, [f"preset={preset}", f"activations.min_elements={min_elements}"]
    )
    x = torch.randn(shape)
    losses = [net(x) for net in (plain, model)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    assert model.w.grad.isfinite()
    if min_elements == 1024 or x.numel() == 0:
        assert torch.equal(model.w.grad, plain.w.grad)


# -- numbers ----------------------------------------------------------------------------------


@every_preset
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_batch_gives_what_plain_gives_and_the_next_one_is_clean(preset, bad):
    torch.manual_seed(1)
    clean, x = images(), images()
    x[1, 2, 3, 4] = bad
    plain = Net()
    model, _ = wrapped(preset, copy.deepcopy(plain))
    for net in (plain, model):
        # As GradScaler does: a step that is not finite is left out, and so is the batch.
        loss = net(x).square().sum()
        assert loss.isnan()
        loss.backward()
        assert not all(g.isfinite().all() for g in gradients(net))
        net.zero_grad()
        net.norm.reset_running_stats()
    results = []
    for net in (plain, model):
        torch.manual_seed(2)
        y = net(clean)
        y.square().sum().backward()
        results.append(y.detach())
        assert all(g.isfinite().all() for g in gradients(net))
    assert_as_near(results[1], results[0], plain, clean, seed=2)


@every_preset
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(preset, dtype):
    model, optimizer = wrapped(preset, Net().to(dtype))
    model(images().to(dtype)).square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()


@every_preset
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(preset, dtype):
    plain, x = Net(), images()
    model, _ = wrapped(preset, copy.deepcopy(plain))
    results = []
    for net in (plain, model):
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype):
            y = net(x)
            loss = y.float().square().sum()
        loss.backward()
        results.append((y.dtype, y.detach().float(), gradients(net)))
    (kind, y, grads), (kind2, y2, grads2) = results
    assert kind == kind2
    assert_as_near(y2, y, plain, x, seed=2)
    assert all(
        g.dtype == h.dtype and h.isfinite().all() for g, h in zip(grads, grads2, strict=True)
    )


# -- the graph --------------------------------------------------------------------------------


@every_preset
@pytest.mark.parametrize(
    "run", [lambda backward, loss: backward(loss), in_thread], ids=["here", "in a thread"]
)
def test_two_backwards_through_one_graph_are_equal(preset, run):
    model, _ = wrapped(preset)
    loss = model(images()).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    run(torch.Tensor.backward, loss)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(model), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_preset
def test_gradients_of_parts_are_those_of_the_whole(preset):
    model, _ = wrapped(preset)
    parts = [model.mix.weight, model.out.bias, model.conv.weight]
    loss = model(images()).square().sum()
    some = torch.autograd.grad(loss, parts, retain_graph=True)
    (alone,) = torch.autograd.grad(loss, [model.layer_norm.weight], retain_graph=True)
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(parts, some, strict=True))
    assert torch.equal(model.layer_norm.weight.grad, alone)


@every_preset
def test_without_gradients_nothing_is_saved_and_training_goes_on(preset):
    model, _ = wrapped(preset)
    x, plain = images(), Net().eval()
    model(x).square().sum().backward()
    before = gradients(model)
    model.eval()
    plain.load_state_dict(model.state_dict())
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            y = model(x)
            assert torch.equal(y, plain(x))
        assert y.grad_fn is None
    # eval() in the middle, with gradients: running statistics, no dropout
    assert_as_near(model(x), plain(x), plain, x)
    model.zero_grad()
    model.train()(x).square().sum().backward()
    assert len(gradients(model)) == len(before)


@every_preset
def test_inputs_made_under_inference_mode_are_refused_as_plain_refuses_them(preset):
    with torch.inference_mode():
        x = images()
    for net in (Net(), wrapped(preset)[0]):
        with pytest.raises(RuntimeError, match="nference"):
            net(x)


class Faulty(Net):
    def forward(self, x):
        y = super().forward(x)
        if self.broken:
            raise ArithmeticError("broken off")
        return y


@every_preset
def test_after_an_exception_in_forward_training_goes_on(preset):
    model, optimizer = wrapped(preset, Faulty())
    x = images()
    for model.broken in (True, False, True, False):
        if model.broken:
            with pytest.raises(ArithmeticError, match="broken off"):
                model(x)
            # Nothing is left on: an op outside saves what plain PyTorch saves.
            w = torch.ones(64, 64, requires_grad=True)
            assert (w * w).grad_fn._saved_self.data_ptr() == w.data_ptr()
        else:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


# -- double backward and changes in place -----------------------------------------------------


class Apply(nn.Module):
    """An op on `y`, which is not the model's input; it may write over `y` afterwards."""

    def __init__(self, op, overwrite=False):
        super().__init__()
        self.w, self.op, self.overwrite = nn.Parameter(torch.ones(())), op, overwrite

    def forward(self, x):
        y = x * self.w
        z = self.op(y)
        return z.sum() + y.mul_(2.0).sum() if self.overwrite else z + 0  # z stays inside


def lossy(site, bits=8):
    few_bit = site.op in ("gelu", "silu", "relu")
    return DerivativeCode(bits=3) if few_bit else Group(bits=bits, group_size=8, rounding="nearest")


def exact(site):
    return Identity()


def intercepted(model, choose, min_elements=1):
    intercept(model, choose, min_elements=min_elements)
    return model


FROZEN = nn.Parameter(torch.eye(16), requires_grad=False)
# Compressed by hooks: the second derivative is that of the decompressed tensors.
HOOKED = {
    "square": lambda x: torch.square(x) @ FROZEN,
    "softmax": lambda x: torch.softmax(x, -1) @ FROZEN,
    "matmul": lambda x: (x @ x.t()).sum(0),
    "sigmoid": lambda x: torch.sigmoid(x) @ FROZEN,
    "exp": lambda x: torch.exp(x) @ FROZEN,
}
# Functions of ours: a payload has no second derivative.
REPLACED = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "layer_norm": lambda x: F.layer_norm(x.view(4, 32), (32,)),
    "group_norm": lambda x: F.group_norm(x.view(1, 4, 32), 4),
    "rms_norm": lambda x: F.rms_norm(x.view(4, 32), (32,)),
    "max_pool2d": lambda x: F.max_pool2d(x.view(1, 8, 4, 4), 2),
    "dropout": lambda x: F.dropout(x, 0.25),
}
EVERY_OP = HOOKED | REPLACED


def twice(model, x):
    """The gradient, with respect to x, of the norm of a first gradient."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    first.square().sum().backward()
    return x.grad


@pytest.mark.parametrize("op", HOOKED)
def test_double_backward_through_compressed_tensors_is_near_the_plain_one(op):
    x = torch.rand(8, 16) + 0.1
    plain = twice(Apply(HOOKED[op]), x)
    coarse, fine = (
        (twice(intercepted(Apply(HOOKED[op]), partial(lossy, bits=bits)), x) - plain).norm()
        for bits in (4, 8)
    )
    # To first order the error is a multiple of the step: 1/15 of a group's range, and 1/255.
    assert 0 < fine < 2 * 15 / 255 * coarse


@pytest.mark.parametrize("op", [op for op in REPLACED if op != "dropout"])
def test_double_backward_through_a_replaced_op_is_a_clear_error(op):
    with pytest.raises(RuntimeError, match="once_differentiable"):
        twice(intercepted(Apply(REPLACED[op]), lossy), torch.rand(8, 16) + 0.1)


@pytest.mark.parametrize("op", ["gelu", "max_pool2d"])
def test_a_replaced_op_that_cannot_take_many_gradients_at_once_says_so(op):
    weight = nn.Parameter(torch.rand(32, 32))
    calls = {"gelu": lambda x: F.gelu(x) @ weight, "max_pool2d": lambda x: F.max_pool2d(x, 2)}
    model = intercepted(Apply(calls[op]), lossy)
    x = torch.rand(2, 4, 32, 32, requires_grad=True)
    y = model(x)
    grads = torch.rand(3, *y.shape)
    with pytest.raises(RuntimeError, match="takes one gradient at a time: remove is_grads_batched"):
        torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="takes one gradient at a time"):
        torch.vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True))(grads)
    for grad in grads:
        assert torch.autograd.grad(y, x, grad, retain_graph=True)[0].isfinite().all()


def test_double_backward_through_dropouts_mask_is_right():
    model = intercepted(Apply(lambda x: F.dropout(x, 0.25)), lossy)
    x = torch.rand(8, 16) + 0.1
    second = twice(model, x)  # of sum((x * m)**3): 36 x**3 m**6, m = 0 or 4/3
    kept = second != 0
    assert 0 < kept.sum() < x.numel()
    torch.testing.assert_close(second[kept], (36 * x**3 * (4 / 3) ** 6)[kept])


@pytest.mark.parametrize("op", EVERY_OP)
def test_double_backward_with_everything_exact_is_the_plain_one(op):
    x = torch.rand(8, 16) + 0.1
    plain = twice(Apply(EVERY_OP[op]), x)
    assert torch.equal(twice(intercepted(Apply(EVERY_OP[op]), exact), x), plain)


SAVES_ITS_INPUT = ("square", "matmul", "gelu", "silu", "layer_norm", "group_norm", "max_pool2d")
PAYLOAD_AT_ONCE = ("layer_norm", "group_norm", "max_pool2d")  # of the ops that are replaced
HOW = {"kept": (exact, 1), "compressed": (lossy, 1), "too small": (lossy, 10**6)}


@pytest.mark.parametrize("op", SAVES_ITS_INPUT)
@pytest.mark.parametrize("how", HOW)
def test_a_saved_tensor_that_was_changed_in_place_is_an_error(op, how):
    if op in PAYLOAD_AT_ONCE and how == "compressed":
        pytest.skip("nothing of the tensor is read again: see below")
    for model in (Apply(EVERY_OP[op], True), intercepted(Apply(EVERY_OP[op], True), *HOW[how])):
        loss = model(torch.rand(8, 16))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("op", PAYLOAD_AT_ONCE)
def test_a_replaced_op_holds_a_payload_of_its_own_and_its_gradient_is_still_right(op):
    x, grads = torch.rand(8, 16, dtype=torch.float64), []
    for overwrite in (False, True):
        model = intercepted(Apply(REPLACED[op], overwrite).double(), lossy)
        model(x).sum().backward()
        grads.append(model.w.grad)
    overwritten = 2 * x.sum()
    # One sum's rounding, with its terms in two orders.
    room = 2 * x.numel() * torch.finfo(x.dtype).eps * overwritten
    assert abs(grads[1] - overwritten - grads[0]) <= room


@pytest.mark.parametrize("op", REPLACED)
def test_a_payload_cannot_be_changed_in_place(op):
    model = intercepted(Apply(REPLACED[op]), lossy)
    z = model(torch.rand(8, 16))
    node = z.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    for payload in node.saved_tensors:
        if payload is not None:
            payload.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
