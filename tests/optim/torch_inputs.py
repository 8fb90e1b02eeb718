"""Torch's own inputs for optimizers, for those of memtrain that stand for each of torch's."""

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from memtrain import optim
from memtrain.compressors import Identity
from memtrain.optim import CompressedOptimizer, compress
from tests.optim.behaviours import FUSED

_TORCHS = """
Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD LBFGS Muon NAdam RAdam RMSprop Rprop SGD
SparseAdam
"""
TORCHS = _TORCHS.split()
"""The optimizers of `torch.testing._internal.common_optimizers.optim_db`."""

_GENERAL = [f"CompressedOptimizer({name})" for name in ("Adam", "SGD")]
NAMES = [*FUSED, "Lion", *(f"compress({name})" for name in TORCHS), *_GENERAL]
"""What the suite runs over: `compress` makes fused ones of Adam, AdamW and SGD."""


class Input(NamedTuple):
    """Keyword arguments of an optimizer, and torch's words for them."""

    options: dict[str, Any]
    what: str


def torchs_inputs() -> Any:
    """The module of torch's tests that has the inputs.

    Stand-ins serve for what it imports: decorators of torch's own tests, whose modules want a
    package that is not here (expecttest) and make thousands of inputs of other ops.
    """
    wanted = {
        "common_device_type": ("tol", "toleranceOverride"),
        "common_methods_invocations": ("DecorateInfo",),
        "common_utils": ("skipIfMPS", "skipIfTorchDynamo"),
    }
    stand_ins = {}
    for module, names in wanted.items():
        made: Any = ModuleType(module)
        vars(made).update(dict.fromkeys(names, lambda *args, **kwargs: None))
        made._TestParametrizer, made.TEST_WITH_TORCHDYNAMO = object, False
        stand_ins[f"torch.testing._internal.{module}"] = made
    with patch.dict(sys.modules, stand_ins):
        return importlib.import_module("torch.testing._internal.common_optimizers")


@cache
def infos() -> dict[str, Any]:
    """Torch's `OptimizerInfo` by the optimizer's name, and one of the same kind for `Lion`."""
    torchs = torchs_inputs()
    found = {info.optim_cls.__name__: info for info in torchs.optim_db}
    found["Lion"] = torchs.OptimizerInfo(
        optim.Lion,
        optim_inputs_func=lambda device, dtype=None: [
            torchs.OptimizerInput(params=None, kwargs=kwargs, desc=str(kwargs))
            for kwargs in (
                {},
                {"lr": 0.01},
                {"lr": torch.tensor(0.001)},
                {"weight_decay": 0.1},
                {"weight_decay": 0.1, "maximize": True},
                {"betas": (0.5, 0.75)},
            )
        ],
        optim_error_inputs_func=torchs.get_error_inputs_for_all_optims,
        supported_impls=(),
        not_og_supported_flags=(),
    )
    return found


def kind(name: str) -> str:
    """The plain optimizer that one of memtrain's stands for.

    Example:
        >>> kind("AdamW8bitFactor"), kind("compress(NAdam)")
        ('AdamW', 'NAdam')
    """
    if name.endswith(")"):
        return name[name.index("(") + 1 : -1]
    return "Lion" if name == "Lion" else getattr(optim, name).plain.__name__


def plain(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """The plain optimizer that one of memtrain's stands for."""
    return infos()[kind(name)].optim_cls(params, **options)


def make(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """One of memtrain's optimizers, its states compressed however small they are."""
    if name == "Lion":
        return optim.Lion(params, **options)
    if name in FUSED:
        return getattr(optim, name)(params, min_elements=0, **options)
    if name.startswith("compress"):
        return compress(plain(name, params, **options), min_elements=0)
    choose = optim.Choice()
    return CompressedOptimizer(plain(name, params, **options), choose, min_elements=0)


def exact(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """As `make`, with every state kept as it is."""
    if name in FUSED:
        return getattr(optim, name)(params, **options)  # of at most 4,096 elements
    if name == "Lion":
        return optim.Lion(params, **options)
    return CompressedOptimizer(plain(name, params, **options), lambda param, state: Identity())


def inputs(name: str, *flags: str) -> Iterator[Input]:
    """Torch's inputs for a CPU, and each with each of `flags` that the optimizer supports."""
    info = infos()[kind(name)]
    for given in info.optim_inputs_func(device="cpu"):
        yield Input(given.kwargs, given.desc)
        for flag in flags:
            if flag in info.supported_impls and (
                flag != "fused" or "cpu" in info.supports_fused_on
            ):
                yield Input({**given.kwargs, flag: True}, f"{given.desc} & {flag}")


def parameters(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """A matrix, and a vector but for Muon, which takes matrices only."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(10, 5)] if kind(name) == "Muon" else [(10, 5), (10,)]
    draw = torch.float32 if not dtype.is_complex else dtype
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=draw).to(dtype)) for s in shapes]


def give_gradients(name: str, *lists: list[Any], seed: int = 0) -> None:
    """Equal gradients, in their dtypes, for lists of equal parameters; SparseAdam's are sparse."""
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*lists, strict=True):
        draw = torch.complex64 if params[0].is_complex() else torch.float32
        grad = torch.randn(params[0].shape, generator=generator, dtype=draw)
        for param in params:
            given = grad.to(param.dtype)
            param.grad = given.to_sparse() if kind(name) == "SparseAdam" else given
