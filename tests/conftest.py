"""Shared fixtures. The interpreter switch must be set before triton is first imported.

Kernels run in the interpreter, also where there is a GPU; `MEMTRAIN_GPU=1` runs them natively: the
tests marked `gpu`, and the Triton cases of all others, which it marks so and whose tensors it puts
on the device. `MEMTRAIN_PTX=1` compiles those cases for a GPU, without one, and executes what was
made on tensors of the CPU (`kernels/no_device.py`).

The interpreter is slow: of a test's cases there, and of those of tests marked `each_value`, CI runs
as many as show each value of each parameter once, and the nightly run the others.
"""

import fcntl
import json
import os
from collections import Counter, defaultdict
from contextlib import nullcontext
from importlib.util import find_spec

import torch

if not os.environ.get("MEMTRAIN_GPU") and not os.environ.get("MEMTRAIN_PTX"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

_GPU = bool(os.environ.get("MEMTRAIN_GPU"))
_PTX = bool(os.environ.get("MEMTRAIN_PTX"))
# Workers side by side share the cores: more threads than cores would wait for each other.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // _WORKERS))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _device(request):
    """Make the tensors of a Triton case where its kernels run."""
    with torch.device("cuda") if _GPU and _interpreted(request.node) else nullcontext():
        yield


@pytest.fixture
def fresh_compiler():
    """Let a test begin without the graphs and counts of others, and leave none."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)`: what `make()` gave, as JSON has it, in the first worker that asked."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def found(name, make):
        results = folder / f"{name}.json"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not results.exists():
                results.write_text(json.dumps(make()))
        return json.loads(results.read_text())

    return found


def _correct_interpreter():
    """Let Triton's interpreter compute as GPUs do.

    Its casts to bfloat16 truncate, and those back lose subnormals. Its minima and maxima keep NaN
    where Triton's pass over it.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.cast_impl

    def cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if (source, target) == (tl.bfloat16, tl.float32):
            bits = src.data.astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), target)
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
            even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            nan = bits & 0x7FFFFFFF > 0x7F800000
            return interpreter.TensorHandle(np.where(nan, 0x7FFF, even).astype(np.uint16), target)
        return plain(self, src, dst_type)

    builder = interpreter.InterpreterBuilder
    builder.cast_impl = cast
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)


def pytest_configure():
    """Execute kernels without a device, where that is asked for."""
    if not _GPU and not _PTX and find_spec("triton"):
        _correct_interpreter()
    if _PTX:
        from tests.kernels.no_device import Execution, execute_launches

        seed = os.environ["MEMTRAIN_PTX"]
        execute_launches(Execution(None if seed == "1" else int(seed)))


@pytest.hookimpl(trylast=True)  # once the test's reports are sent
def pytest_runtest_logfinish():
    """End a worker whose device has faulted, and with it each later test: another one starts."""
    if _GPU and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    if _GPU or _PTX:  # where no case is slow
        for item in filter(_interpreted, items):
            item.add_marker("gpu")
        return
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("nightly") and _slow(item):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        for case in _repeating(cases):
            case.add_marker("nightly")


def _slow(item):
    return _interpreted(item) or item.get_closest_marker("each_value")


def _interpreted(item):
    """Whether a test runs a Triton kernel: by its name, or that of its case."""
    case = item.callspec.id.split("-") if hasattr(item, "callspec") else ()
    return "triton" in getattr(item, "originalname", "") or "triton" in case


def _repeating(cases):
    """The cases whose values of parameters others show: those that show most go first."""
    values = {
        case: {(name, _hashable(value)) for name, value in case.callspec.params.items()}
        for case in cases
    }
    shown = Counter()

    def worth(case):
        return len(values[case] - shown.keys()), -sum(shown[value] for value in values[case])

    while any(of - shown.keys() for of in values.values()):
        shown.update(values.pop(max(values, key=worth)))
    return values


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def pytest_terminal_summary(terminalreporter):
    """Print the sum of the counts that tests recorded as properties."""
    sums = defaultdict(Counter)
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if report.when == "call" and isinstance(value, dict):
                sums[name].update(value)
    for name, counts in sums.items():
        found = ", ".join(f"{kind} {n}" for kind, n in counts.most_common())
        terminalreporter.write_line(f"{name}: {found}")
