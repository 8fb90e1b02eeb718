"""Where a saved tensor comes from, in a name that people can read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from memtrain.compressors import Keep

ROOT = "(root)"
"""How the model itself is named where a module's path stands."""
RECOMPUTE = "recompute"
"""The op name in sites of inputs of recomputed modules."""
CHECKPOINT_INPUT = Keep("a checkpointed module's input")
"""Why they are kept as they are."""
CUSTOM_FUNCTION = "saved by a custom autograd Function"
UNKNOWN_OP = "memtrain does not know"
UNKNOWN_READER = "an op reads it whose gradient may be largest where it is smallest"
NO_RULE = Keep("no rule matches")
MODEL_INPUT = "the model's own input: stays alive anyway"
OTHER_HOOKS = "saved-tensor hooks of someone else are on"
IN_TRANSFORM = "inside a transform of torch.func or forward-mode differentiation"
OTHER_THREAD = "another thread runs a forward: one at a time is compressed"
SHARDED = "a tensor subclass: DTensor"
"""Why other tensors are."""


class Site(NamedTuple):
    """One tensor that one op of one module saves for its backward."""

    module: str
    op: str
    tensor: str

    @property
    def name(self) -> str:
        """Return the name in plans.

        Example:
            >>> Site("h.3.mlp.act", "gelu", "input").name
            'h.3.mlp.act / gelu / input'
        """
        return f"{self.module or ROOT} / {self.op} / {self.tensor}"

    @classmethod
    def parse(cls, name: str) -> "Site":
        """Return the site of a name."""
        parts = name.split(" / ")
        if len(parts) != 3:
            raise ValueError(f"site {name!r}; allowed: module / op / tensor")
        return cls("" if parts[0] == ROOT else parts[0], *parts[1:])


class Record(NamedTuple):
    """Bytes of one save: a row of the audit."""

    site: Site
    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # of the storage that plain PyTorch would keep; 0 where it is counted already
    planned: int  # of what is kept instead
    compressor: str  # "" where the tensor is kept as it is
    reason: str  # why it is kept, or a note
    storage: int = 0  # number of the storage within its forward: equal where saves share it
    source: str = ""  # of a derived output: the op that it is computed again from


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors among a function's arguments and in lists of them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return tuple(found)


def tensors_in(output: Any) -> Sequence[Tensor]:
    """Return the tensors of a model's output: alone, in tuples, lists, dicts and their like.

    What is inside other objects, such as a cache of keys, does not count as the user's.
    """
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, dict):
        return [x for value in output.values() for x in tensors_in(value)]
    if isinstance(output, tuple | list):
        return [x for value in output for x in tensors_in(value)]
    return ()
