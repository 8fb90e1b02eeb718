"""Which compressor keeps which state of which parameter, and why."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.compressors import check_role
from memtrain.compressors.base import STATE, Compressor, Keep, Key, Packed
from memtrain.compressors.codebook import Block
from memtrain.compressors.identity import Identity
from memtrain.compressors.named import named
from memtrain.optim.states import shards
from memtrain.optim.states.per_parameter import stands_for

Choose = Callable[[Tensor, str], Compressor | Keep]

MIN_ELEMENTS = 4096  # the paper's rule: tensors of at most so many elements keep exact states
COMPLEX = "kept: the parameter is complex"
STEP = "rounding_step"  # a state's own count of steps, for stochastic rounding


class StateRow(NamedTuple):
    """One line of `describe`: a parameter's state, how it is kept, and its bytes."""

    param: Tensor
    param_name: str
    state: str
    compressor: Compressor
    nbytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The default `choose`: names for first moments and second moments.

    Attributes:
        first: Name of the compressor of signed states (`named`).
        second: Name of the compressor of states that are never negative (`exp_avg_sq`).
        bits: Bits per code of both, 2 to 8.
        seed: Feeds the stochastic rounding of `+SR` names without a fused kernel.

    Raises:
        ValueError: If a name is unknown.

    Example:
        >>> Choice()(torch.zeros(100, 100), "exp_avg")
        Block(block_size=128, map='DE', bits=4, signed=True, rounding='nearest')
    """

    first: str = "B128/DE"
    second: str = "Rank-1/Linear"
    bits: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        named(self.first, signed=True, bits=self.bits)
        named(self.second, signed=False, bits=self.bits)

    @property
    def instead(self) -> Block | None:
        """Substitute for factors that cannot pay, beside a first moment of 8 bits."""
        if self.second != "factored" or self.bits != 8:
            return None
        return Block(block_size=256, map="DE-0", bits=8, signed=False)

    def __call__(self, param: Tensor, state_name: str) -> Compressor:
        """Return the compressor of one state of one parameter."""
        if is_unsigned(state_name):
            return named(self.second, signed=False, bits=self.bits)
        return named(self.first, signed=True, bits=self.bits)


UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf")
SIGNED = ("exp_avg", "momentum_buffer", "grad_avg")
"""Names of states, of torch.optim's optimizers and others, by whether they are ever negative."""


def is_unsigned(state_name: str) -> bool:
    """Whether a state of this name (of torch.optim's optimizers) is never negative."""
    return state_name in UNSIGNED


def decide(
    param: Tensor, choose: Choose, state_name: str, min_elements: int = -1
) -> tuple[Compressor, str]:
    """Return the compressor of a state, and the reason if it is not the chosen one.

    Example:
        >>> from memtrain.compressors import Factored
        >>> decide(torch.zeros(1, 9001), lambda param, state: Factored(), "exp_avg_sq")
        (Block(block_size=128, map='Linear', bits=4, signed=False, rounding='nearest'),
         'factored vectors would cost 4.00 bytes per parameter: block instead')
    """
    if param.is_complex():
        return Identity(), COMPLEX
    if why := too_small(param, min_elements):
        return Identity(), why
    chosen = choose(stands_for(param), state_name)
    if isinstance(chosen, Keep):
        return Identity(), chosen.reason
    check_state(chosen, state_name)
    used, why = chosen.for_shape(param.shape)
    instead = getattr(choose, "instead", None)
    used = instead if why and instead is not None else used
    if not shards.splits_rows(param):
        return used, why
    by_rows, other = used.for_rows(param.shape[1:].numel())
    return by_rows, "; ".join(filter(None, (why, other)))


def check_state(compressor: Compressor, state_name: str) -> None:
    """Raise `ValueError` for a compressor that cannot serve a state."""
    check_role(compressor, STATE, state_name)
    if compressor.fused_only and state_name != "exp_avg":
        raise ValueError(
            f"{compressor!r} for the state {state_name!r}; allowed: exp_avg of AdamW and Adam"
        )
    if state_name in SIGNED and not (compressor.signed and compressor.first_moment):
        raise ValueError(
            f"{compressor!r} for the state {state_name!r}, which has negative values and must not "
            "drift to one side; allowed: compressors with signed values and scales (signed: true): "
            "names such as 'B128/DE'"
        )
    if not compressor.second_moment and is_unsigned(state_name):
        raise ValueError(
            f"{compressor!r} for the state {state_name!r}, which divides the update: the "
            "compressor rounds small numbers to zero; allowed: identity, factored, and maps "
            "without zero and sign (signed: false): names such as 'Rank-1/Linear' or 'B256/DE-08'"
        )


def refuse_fused_only(compressors: Iterable[Compressor], owner: str) -> None:
    """Raise `ValueError` for compressors of a parameter that need a fused kernel."""
    for compressor in compressors:
        if compressor.fused_only:
            raise ValueError(
                f"{compressor!r} in {owner}: its rounding error must be added to the weight, which "
                "only the fused AdamW and Adam do, with a factored second moment "
                "(optim=factored_2bit); allowed: B128/DE here (optim=factored_4bit)"
            )


def eligible(param: Tensor, value: Any, min_elements: int = -1) -> str:
    """Return the reason to keep a state as it is, or "" if it may be compressed."""
    if not isinstance(value, Tensor):
        return "kept: not a tensor"
    if not value.is_floating_point():
        return f"kept: {value.dtype} is not a float type"
    if not value.dim():
        return "kept: a single number"
    if value.shape != param.shape:
        return f"kept: shape {tuple(value.shape)} is not the parameter's"
    if not shards.same_placement(value, param):
        return "kept: not sharded as its parameter is"
    return too_small(value, min_elements)


def too_small(x: Tensor, min_elements: int) -> str:
    """Return the reason to keep a small tensor as it is, or ""."""
    n = x.numel()
    return f"kept: {n} elements <= min_elements {min_elements}" if n <= min_elements else ""


_DEFAULT_KEY = Key()


def pack(compressor: Compressor, x: Tensor, key: Key = _DEFAULT_KEY) -> Tensor | dict[str, Tensor]:
    """Compress a state: a plain tensor (identity) or a dict of plain tensors.

    Collective for a sharded tensor, whose dict is of this process's part.
    """
    if compressor.is_identity:
        return x
    shard = shards.shard_of(x)
    if shard is not None:
        part = shards.local(x.detach())
        return dict(compressor.compress_part(part, key=key, shard=shard).tensors)
    return dict(compressor.compress(shards.local(x.detach()), key=key).tensors)


def unpack(
    compressor: Compressor,
    stored: Tensor | dict[str, Tensor],
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Invert `pack`; `like` has the shape, the dtype (unless given) and the sharding."""
    if isinstance(stored, Tensor):
        return stored
    shape, shard, dtype = shards.local(like).shape, shards.shard_of(like), dtype or like.dtype
    packed = Packed(stored, shape, dtype)
    if shard is not None:
        whole = compressor.decompress_part(packed, shard=shard)
    else:
        whole = compressor.decompress(packed)
    return shards.sharded_like(whole, like)


def check_payload(param: Tensor, name: str, value: Any, compressor: Compressor) -> None:
    """Raise `ValueError` for a payload of another compressor or of another size."""
    want = pack(
        compressor, torch.empty(shards.local(param).shape, dtype=param.dtype, device="meta")
    )
    wanted = "a plain tensor" if isinstance(want, Tensor) else _sizes(want)
    if _sizes(value) != wanted:
        raise ValueError(
            f"state {name!r} of a parameter of shape {tuple(param.shape)} holds {_sizes(value)}, "
            f"but {compressor} needs {wanted}: make a new optimizer for a parameter that has "
            "changed its size; load a checkpoint under the config that saved it (memtrain.optim."
            "portable_state_dict then gives one for any)"
        )


def _sizes(payload: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (tuple(x.shape), x.dtype) for name, x in payload.items()}


_OPTIONAL = ("max_exp_avg_sq", "momentum_buffer", "grad_avg")
"""States that an option adds: they stay after the option has been switched off."""


def check_states(param: Tensor, values: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` for states of another optimizer, and for plain states of another shape.

    `shapes` are those of the optimizer's own states, by name.
    """
    known = {*SIGNED, *UNSIGNED}.difference(_OPTIONAL, shapes)
    if values and (shapes.keys() - values.keys() or known & values.keys()):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has the states {sorted(values)}; allowed: "
            f"{sorted(shapes)}, as this optimizer makes them"
        )
    for name, shape in shapes.items():
        value = values.get(name)
        if isinstance(value, Tensor) and name != "step" and value.shape != shape:
            raise ValueError(
                f"state {name!r} has shape {tuple(value.shape)}, and a parameter of shape "
                f"{tuple(param.shape)} needs {tuple(shape)}"
            )


def is_packed(value: Any, parts: Collection[str]) -> bool:
    """Whether a state's value is a payload: a dict of these parts."""
    return isinstance(value, dict) and bool(value) and all(name in parts for name in value)


@cache
def payload_bytes(compressor: Compressor, shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the bytes of a payload, by compressing a tensor without data."""
    return compressor.compress(torch.empty(shape, dtype=dtype, device="meta"), key=Key()).nbytes
