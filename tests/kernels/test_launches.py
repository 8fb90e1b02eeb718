"""Every Triton kernel is launched on the device of its tensors, whichever is current."""

import ast
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

import memtrain
from memtrain.kernels import cpu, device_guard, dispatch
from memtrain.kernels.codebook.quantize import quantize_blocks_reference
from memtrain.kernels.codebook.values import Codebook
from memtrain.kernels.dispatch import backend, simulating
from memtrain.kernels.step import launch, prepared
from memtrain.kernels.step.codecs import Codec
from memtrain.kernels.step.groups import same_kernels
from tests.kernels import test_adamw
from tests.kernels.aot_cases import CASES
from tests.kernels.steps import fused_step

SOURCES = sorted(Path(memtrain.__file__).parent.rglob("*.py"))


def launches(source, kernels):
    """Lines of `kernel[grid](...)`, under the kernel's own name or another's."""
    tree = ast.parse(source)
    names = kernels | {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and last_name(node.value) in kernels
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Subscript) and last_name(call.func.value) in names
    ]


def last_name(node):
    return getattr(node, "id", getattr(node, "attr", None))


def test_kernels_are_launched_by_the_guard_only():
    texts = {path: path.read_text() for path in SOURCES}
    kernels = {n for text in texts.values() for n in re.findall(r"def (\w+_kernel)\(", text)}
    assert "_update_kernel" in kernels
    assert launches("run = a._update_kernel\nrun[(1,)](x)\n_update_kernel[g](x)", kernels) == [2, 3]
    assert [path.name for path, text in texts.items() if launches(text, kernels)] == []


def specialised(source, name):
    """Kernels of a source that have an argument `name` and do not say `do_not_specialize`."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = [f for f in functions if name in (a.arg for a in f.args.args)]
    decorated = [(f.name, ast.unparse(d)) for f in found for d in f.decorator_list]
    return [
        function
        for function, text in decorated
        if function.endswith("_kernel") and not ("do_not_specialize=" in text and name in text)
    ]


def test_no_kernel_is_compiled_for_a_seed():
    """One that is 1, or a multiple of 16, would else have a binary of its own."""
    assert specialised("@triton.jit\ndef a_kernel(x_ptr, seed): 0", "seed") == ["a_kernel"]
    kernels = [path for path in SOURCES if path.name.endswith("_triton.py")]
    assert [specialised(path.read_text(), "seed") for path in kernels] == [[] for _ in kernels]
    assert sum("seed" in path.read_text() for path in kernels) > 4


class Placed:
    """Stands for a tensor of a device."""

    def __init__(self, where):
        self.device = torch.device(where)


class Kernel:
    """Writes down where it was launched."""

    def __init__(self):
        self.log = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.log.append((torch.cuda.current_device(), grid))


def test_the_tensors_device_is_current_in_a_launch(monkeypatch):
    current, entered = [0], []

    class Guard:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            entered.append(self.index)
            current.append(self.index)

        def __exit__(self, *error):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    kernel = Kernel()
    for where in ("cuda:1", "cuda:0", "cpu"):
        device_guard.launch(kernel, (4,), Placed(where), 7, BLOCK=2)
    assert kernel.log == [(1, (4,)), (0, (4,)), (0, (4,))]
    assert entered == [1]  # nothing is entered where the device is current already


def test_a_launch_on_amd_asks_for_what_its_compiler_knows(monkeypatch):
    asked = []

    class Asked:
        def __getitem__(self, grid):
            return lambda *arguments, **options: asked.append(options)

    card = SimpleNamespace(warp_size=64)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for where in ("cuda:0", "cpu"):
        x = Placed(where)
        device_guard.launch(Asked(), (4,), x, BLOCK=2, num_warps=32, maxnreg=64)
        device_guard.launch(Asked(), (4,), x, BLOCK=2)
    given = {"BLOCK": 2, "num_warps": 32, "maxnreg": 64}
    assert asked == [{"BLOCK": 2, "num_warps": 16}, {"BLOCK": 2}, given, {"BLOCK": 2}]


@triton.jit
def _sum_kernel(out_ptr, x_ptr, first, n, factor, other, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    total = tl.load(x_ptr + first + at) * factor + tl.cast(n // 3, tl.float32)
    if other is not None:
        total += tl.load(other + at)
    tl.store(out_ptr + at, total)


def test_triton_launches_again_what_was_compiled_for_such_arguments():
    """A binary for 1, multiples of 16, whole addresses or 32 bits is for no other arguments."""
    size = 512  # so that a thread loads four elements
    x = torch.arange(2 * size) / 4
    numbers = (1, 16, 3, 2**33 + 1)
    each = [*itertools.product((0, 1, 4), (1, 16, 3), numbers, (2.5, 1.0), (False,))]
    for skipped, first, n, factor, adds in [*each, (0, 3, 3, 1.0, True), *each]:
        whole, out = x[skipped:], torch.zeros(size)
        other = whole[:size] if adds else None
        device_guard.launch(_sum_kernel, (1,), out, whole, first, n, factor, other, SIZE=size)
        want = whole[first : first + size] * factor + n // 3 + (whole[:size] if adds else 0)
        assert torch.equal(out, want), (skipped, first, n, factor, adds)
    half = torch.zeros(size // 2)
    device_guard.launch(_sum_kernel, (1,), half, x, 1, 1, 1.0, None, SIZE=size // 2)
    assert torch.equal(half, x[1 : 1 + size // 2])


def constants_by_place(source):
    """Launches that give the kernel of a module more arguments than it has before its constants."""
    tree = ast.parse(source)
    room = {
        one.name: sum(ast.unparse(a.annotation or a) != "tl.constexpr" for a in one.args.args)
        for one in tree.body
        if isinstance(one, ast.FunctionDef)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        node.lineno
        for node in calls
        if last_name(node.func) == "launch"
        and not any(isinstance(one, ast.Starred) for one in node.args)
        and len(node.args) - 2 > room.get(last_name(node.args[0]), len(node.args))
    ]


def test_constants_are_launched_by_their_names():
    """Their position would not distinguish two binaries (`launch_cached`)."""
    kernel = "def a_kernel(x_ptr, n, SIZE: tl.constexpr): 0\n"
    assert constants_by_place(f"{kernel}launch(a_kernel, (1,), x, 3, 16)") == [2]
    assert constants_by_place(f"{kernel}launch(a_kernel, (1,), x, 3, SIZE=16)") == []
    assert [constants_by_place(path.read_text()) for path in SOURCES] == [[] for _ in SOURCES]
    by_place = SimpleNamespace(params=[SimpleNamespace(is_constexpr=True)])
    with pytest.raises(TypeError, match="a constant among the arguments"):
        device_guard.launch_cached(by_place, (1,), (3,), {}, 0)


@pytest.mark.skipif(cpu.library() is None, reason="no C++ library")
def test_each_device_steps_its_own_parameters(monkeypatch):
    """Interpreted kernels stand for a GPU: they take what `choose` says lies there."""
    shapes = [(3, 128), (3, 77), (2, 43), (130,)]

    def entries():
        torch.manual_seed(0)
        kinds = ("block", "rank1", "block", "exact")
        return [
            test_adamw.entry(s, k, test_adamw.hyper()) for s, k in zip(shapes, kinds, strict=True)
        ]

    ours, theirs = entries(), entries()
    on_gpu = {id(ours[k].param) for k in (1, 2)}
    seen = {"cpu": [], "triton": []}
    on_cpu, by_triton = prepared.CpuEntryGroup, launch.TritonEntryGroup
    with FakeTensorMode():
        params = [torch.empty(2, device=device) for device in ("cuda:1", "cpu", "cuda:1")]
        placed = [e._replace(param=param) for e, param in zip(ours, params, strict=False)]
        assert prepared._backends(placed) == [dispatch.choose(param) for param in params]
    monkeypatch.setattr(
        prepared, "_backends", lambda es: ["triton" if id(e.param) in on_gpu else "cpu" for e in es]
    )
    monkeypatch.setattr(prepared, "CpuEntryGroup", lambda e: seen["cpu"].extend(e) or on_cpu(e))
    monkeypatch.setattr(
        launch, "TritonEntryGroup", lambda e: seen["triton"].extend(e) or by_triton(e)
    )
    fused_step(ours)
    places = {id(e.param): k for k, e in enumerate(ours)}
    assert {name: [places[id(e.param)] for e in some] for name, some in seen.items()} == {
        "cpu": [0, 3],
        "triton": [1, 2],
    }
    monkeypatch.undo()
    with backend("reference"):
        fused_step(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.param, b.param)


def test_one_launch_serves_one_device():
    whole = test_adamw.entry((4, 128), "exact", test_adamw.hyper())
    with simulating("cuda"), FakeTensorMode():
        params = [torch.empty(4, 128, device=device) for device in ("cuda:0", "cuda:1", "cuda:0")]
        found = {same_kernels(whole._replace(param=param)) for param in params}
    assert len(found) == 2


@pytest.mark.parametrize(("kind", "shape"), [("block", (3, 80)), ("rank1", (4, 128))])
def test_vectors_are_loaded_where_all_is_aligned(kind, shape):
    entry = test_adamw.entry(shape, kind, test_adamw.hyper())
    assert launch.is_whole(entry)
    moved = torch.zeros(1 + entry.grad.numel())[1:].view(shape)
    assert not launch.is_whole(entry._replace(grad=moved))
    odd = (3, 81) if kind == "block" else (4, 129)
    assert not launch.is_whole(test_adamw.entry(odd, kind, test_adamw.hyper()))


def test_a_step_is_launched_as_it_is_compiled_ahead_of_time(monkeypatch):
    """With the constants and options of a case, which the ahead-of-time test compiles."""
    taken = []
    monkeypatch.setattr(launch, "launch", lambda kernel, *_, **given: taken.append((kernel, given)))
    entries = []
    for shape in ((4, 256), (4, 129)):
        entries += [test_adamw.entry(shape, kind, test_adamw.hyper()) for kind in test_adamw.CODECS]
        exact = test_adamw.entry(shape, "exact", test_adamw.hyper())
        codecs = (Codec("block", 8, "DE"), Codec("block", 8, "DE", signed=False))
        books = [Codebook("DE", 8, codec.signed) for codec in codecs]
        coded = [quantize_blocks_reference(exact.param, book, 256) for book in books]
        states = tuple(map(test_adamw.coded, coded))
        entries.append(exact._replace(states=states, codecs=codecs))
    with backend("triton"):
        for entry in entries:
            fused_step([entry])
    # Of nine kinds of states; rank-1 takes one launch more, factored three.
    assert len(taken) == 2 * (9 + 2 * 1 + 3 * 3)
    made = CASES["step.step_triton"] + CASES["step.reduce_triton"]
    cases = [(kernel, constants) for kernel, _, constants in made]
    assert [one for one in taken if one not in cases] == []
    # Contracted, `m + a * (g - m)` would be rounded once where the reference rounds twice.
    assert all(options["enable_fp_fusion"] is False for _, options in taken)
