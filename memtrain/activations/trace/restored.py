"""What an inspection restores of a model that it runs, and of the process."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from memtrain.kernels.random.generators import random_state, set_random_state


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy when the block ends."""
    with unset_fake_temporarily():
        states = random_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with unset_fake_temporarily():
            set_random_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the modules' own attributes, and what lists, dicts and sets among them contain.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> model.seen = []
        >>> with attributes_restored(model):
        ...     model.seen.append(1)
        ...     model.calls = 1
        >>> model.seen, hasattr(model, "calls")
        ([], False)
    """
    internal = vars(nn.Module()).keys()
    before = [
        (module, {k: v for k, v in vars(module).items() if k not in internal})
        for module in model.modules()
    ]
    contents = [
        (value, copy.copy(value))
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (dict, list, set)
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in vars(module).keys() - internal - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
