"""Torch's own samples of each op and module: as steps of a training run whose arguments differ."""

from collections import defaultdict
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

LOOKED_AT = 96
"""Samples of an op that are looked at."""
ENOUGH = 1024
"""Elements of the largest tensor of an enlarged sample."""
MOST = 2**16
"""Elements of all tensors of an enlarged sample."""
GROWING = ("block_diag", "broadcast_tensors", "cartesian_prod", "combinations", "tensor_split")
"""Ops whose result grows with a power of their inputs' sizes: their samples stay small."""


class Call(NamedTuple):
    """One call of an op or a module: what runs, and the tensors that it is called with."""

    function: object
    """None: the module of this number in the model."""
    args: tuple
    kwargs: dict
    process: object = None
    number: int = 0

    @property
    def tensors(self):
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @property
    def signature(self):
        """What a decision that forgets the other arguments would be remembered by."""
        return tuple((tuple(x.shape), x.dtype) for x in self.tensors)

    def to(self, dtype):
        """The call in another dtype, as far as it has floats."""

        def convert(x):
            if not (x.is_floating_point() or x.is_complex()):
                return x
            wide = dtype.to_complex() if x.is_complex() else dtype.to_real()
            return x.detach().to(wide).requires_grad_(x.requires_grad)

        args, kwargs = tree_map_only(Tensor, convert, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def moved(self, eps):
        """The call with every number of its tensors off by that share, up or down as drawn."""
        generator = torch.Generator().manual_seed(0)

        def move(x):
            if not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided:
                return x
            signs = 2 * torch.randint(2, x.shape, generator=generator) - 1
            return (x.detach() * (1 + eps * signs)).requires_grad_(x.requires_grad)

        args, kwargs = tree_map_only(Tensor, move, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def fresh(self, inner):
        """The call on tensors of its own.

        Args:
            inner: Whether the op sees results of another op, in place of the leaves.

        Returns:
            A function that runs it in a model of such modules, and the leaves that need a gradient.
        """
        leaves = {}

        def leaf(x):
            if id(x) not in leaves:
                with torch.no_grad():
                    leaves[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
            return leaves[id(x)]

        args, kwargs = tree_map_only(Tensor, leaf, (self.args, self.kwargs))

        def run(own):
            function = self.function or own[self.number]
            through = {}

            def behind(x):
                if id(x) not in through:
                    through[id(x)] = _behind(x)
                return through[id(x)]

            a, k = tree_map_only(Tensor, behind, (args, kwargs)) if inner else (args, kwargs)
            out = function(*a, **k)
            return out if self.process is None else self.process(out)

        return run, [x for x in leaves.values() if x.requires_grad]


def _behind(x):
    """The same numbers, as an op's result."""
    if x.layout is not torch.strided:
        return x
    if x.is_floating_point() or x.is_complex():
        return x * 1
    return x.clone()


def steps_of(op, dtype, count, form="function"):
    """Calls of an op: equal tensors and different other arguments, as far as it has such samples.

    Args:
        op: Of torch's database.
        dtype: Of the samples.
        count: At most.
        form: `function`, `method`, `inplace`, or an alias's name.
    """
    function = form_of(op, form)
    torch.manual_seed(0)
    groups = defaultdict(list)
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=True), LOOKED_AT):
        call = Call(
            function, (sample.input, *sample.args), sample.kwargs, sample.output_process_fn_grad
        )
        groups[call.signature].append(call)
    ordered = sorted(groups.values(), key=len, reverse=True)  # the largest group goes first
    # up to half of the steps from the largest group, the others from all groups in turn
    first, rest = ordered[0], ordered[1:]
    chosen = first[: max(count // 2, count - sum(map(len, rest)))]
    queue = [first[len(chosen) :], *rest]
    while len(chosen) < count and any(queue):
        for group in queue:
            if group and len(chosen) < count:
                chosen.append(group.pop(0))
    return chosen


def module_steps(info, dtype, count, training):
    """Modules of a class of torch's, and a call of each.

    Args:
        info: Of torch's database.
        dtype: Of parameters and inputs.
        count: At most.
        training: Whether they train.
    """
    torch.manual_seed(0)
    own, calls = [], []
    found = info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=training)
    for sample in found:
        if len(own) == count:
            break
        if sample.forward_input is None:
            continue
        built, given = sample.constructor_input, sample.forward_input
        module = info.module_cls(*built.args, **built.kwargs).to("cpu", dtype).train(training)
        if isinstance(module, LazyModuleMixin):
            module(*given.args, **given.kwargs)
        calls.append(Call(None, tuple(given.args), given.kwargs, number=len(own)))
        own.append(module)
    return own, calls


def form_of(op, form):
    if form == "function":
        return op.op
    if form == "method":
        return op.method_variant
    if form == "inplace":
        return op.inplace_variant
    return next(alias.op for alias in op.aliases if alias.name == form)


def forms_of(op):
    """All ways in which the database says that the op may be called."""
    forms = ["function"]
    forms += ["method"] * (op.method_variant is not None)
    forms += ["inplace"] * (op.inplace_variant is not None and op.supports_inplace_autograd)
    return forms + [alias.name for alias in op.aliases if alias.op is not None]


def enlarged(call):
    """The call with its tensors repeated until the largest has 1,024 elements.

    Returns:
        Candidates, best first, of which the op may take some: all dims of all tensors repeated as
        often, or the first dim, or the last. None where no tensor can grow.
    """
    sizes = [x.numel() for x in call.tensors if x.layout is torch.strided]
    if not sizes or not max(sizes):
        return []
    if max(sizes) >= ENOUGH:
        return [call]
    largest = max(call.tensors, key=Tensor.numel)
    dims = sum(n > 1 for n in largest.shape)
    times = 2
    while dims and largest.numel() * times**dims < ENOUGH:
        times += 1
    once = -(-ENOUGH // largest.numel())
    ways = [_every_dim(times)] * (dims > 0)
    ways += [_one_dim(once, largest, dim) for dim in (0, -1)]
    calls = [_repeated(call, way) for way in ways]
    return [c for c in calls if sum(x.numel() for x in c.tensors) <= MOST]


def _every_dim(times):
    return lambda x: [times if n > 1 else 1 for n in x.shape]


def _one_dim(times, largest, dim):
    def way(x):
        repeats = [1] * x.dim()
        if repeats and largest.dim() and x.shape[dim] == largest.shape[dim] > 0:
            repeats[dim] = times
        return repeats

    return way


def _repeated(call, way):
    def repeat(x):
        if x.layout is not torch.strided:
            return x
        with torch.no_grad():
            return x.detach().repeat(way(x)).requires_grad_(x.requires_grad)

    args, kwargs = tree_map_only(Tensor, repeat, (call.args, call.kwargs))
    return call._replace(args=args, kwargs=kwargs)


def ops(dtype):
    """The ops of torch's database that have a gradient in this dtype."""
    return [op for op in op_db if op.supports_autograd and dtype in op.backward_dtypes]


def modules(dtype):
    """The modules of torch's database that have a gradient in this dtype."""
    return [m for m in module_db if dtype in m.dtypes]


def full_name(op):
    """A unique name for pytest's ids."""
    variant = getattr(op, "variant_test_name", "")
    return f"{op.name}.{variant}" if variant else op.name
