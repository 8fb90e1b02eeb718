"""Optimizers whose kernels decompress, step and compress all parameters at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.compressors.base import Compressor
from memtrain.compressors.codebook import Block
from memtrain.compressors.identity import Identity
from memtrain.kernels import cpu
from memtrain.kernels.step import adamw, blockstep, cuda_graph
from memtrain.kernels.step.cuda_graph import Kept
from memtrain.kernels.step.scalars import Number, on_device
from memtrain.kernels.step.split import PLAIN, Beside
from memtrain.optim.fused import capturable
from memtrain.optim.states import layout
from memtrain.optim.states.base import CompressedStates, closure_loss, refuse_complex, refuse_sparse
from memtrain.optim.states.shards import local, sharded_like

Entry = adamw.Entry | blockstep.Entry
REFUSED = {
    "amsgrad": "its running maximum has no fused kernel: use CompressedOptimizer around torch's",
    "differentiable": "compressed states have no gradient",
}


class FusedStates(CompressedStates):
    """What the fused optimizers share: the loop of `step`, first states, checks.

    A subclass says which states a parameter has, the numbers of its step, and the kernel's entry
    for a choice of compressors.
    """

    names: ClassVar[tuple[str, ...]] = ()
    first_default: ClassVar[str] = "B128/DE"
    second_default: ClassVar[str] = "Rank-1/Linear"
    bits: ClassVar[int] = 4
    counts: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        choose: layout.Choice,
    ) -> None:
        self.choose = choose
        super().__init__(params, defaults)

    @classmethod
    def taking_over(cls, original: Optimizer, choose: layout.Choose) -> "FusedStates":
        """An optimizer that shares the groups of a plain one and has no states yet."""
        new = cls([{"params": group["params"]} for group in original.param_groups])  # pyright: ignore[reportCallIssue]
        new.choose = choose
        return new

    def numbers(self, group: dict[str, Any], turn: Number) -> Any:
        """The kernel's numbers for a group's step `turn` (1 is a parameter's first)."""
        raise NotImplementedError

    def entry(
        self,
        param: Tensor,
        payloads: Sequence[dict[str, Tensor]],
        compressors: Sequence[Compressor],
        numbers: Any,
    ) -> Entry | None:
        """The kernel's entry, or None where no kernel serves these compressors."""
        raise NotImplementedError

    def serves(self, compressors: Sequence[Compressor]) -> bool:
        """Whether a kernel serves these compressors of a parameter's states."""
        return all(block_bits(compressor, signed=True) is not None for compressor in compressors)

    @contextmanager
    def beside(self, found: Mapping[Tensor, Beside]) -> Iterator[None]:
        """Steps inside the block read and write masters of these parameters.

        Args:
            found: Parameter -> what it has besides itself.
        """
        self._beside = found
        try:
            yield
        finally:
            del self._beside

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for a group's options that are out of range or not supported."""
        for name, why in REFUSED.items():
            if group.get(name):
                raise ValueError(f"{type(self).__name__} has no {name}: {why}")

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The states that a parameter of a group has, its step counter left out."""
        return self.names

    def turn(self, param: Tensor) -> float:
        """Count a step of a parameter; the first is 1. Optimizers without a counter say 1 or 2."""
        return 2.0 if self.state.get(param) else 1.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its options and its parameters are checked."""
        self.check({**self.defaults, **param_group})
        params = param_group["params"]
        if isinstance(params, Tensor):
            refuse_complex([params], type(self).__name__)
        elif not isinstance(params, set):  # torch's own message tells that sets have no order
            param_group = {**param_group, "params": list(params)}
            refuse_complex(param_group["params"], type(self).__name__)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient.

        Args:
            closure: Recomputes the loss; optional.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: For sparse or complex gradients; nothing was changed then.
            ValueError: For a group's option that is out of range; nothing was changed then.
        """
        loss = closure_loss(closure)
        refuse_sparse([p for g in self.param_groups for p in g["params"]], type(self).__name__)
        capturable.check(type(self).__name__, self.param_groups)
        for group in self.param_groups:
            self.check(group)
        entries: list[Entry] = []
        looks = not cuda_graph.capturing()
        watched = self._watch.before(self.param_groups, self._masters()) if looks else None
        for group in self.param_groups:
            ready = [param for param in group["params"] if param.grad is not None]
            names, numbers = self.state_names(group), self._all_numbers(group, ready)
            for param in ready:
                self._first_states(param, names)
                self._add(entries, param, names, numbers[param])
        _run(entries, self.__dict__.setdefault("_kept", Kept()))
        self._watch.after(watched)
        self.tell_schedulers()
        return loss

    def counter(self, param: Tensor, device: torch.device) -> Tensor:
        """A parameter's count of steps, float32: on its device if it is capturable."""
        step = self.state[param].get("step", 0.0)
        if not isinstance(step, Tensor) or step.device != device:
            self.state[param]["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)
        return self.state[param]["step"]

    def _all_numbers(self, group: dict[str, Any], params: Sequence[Tensor]) -> dict[Tensor, Any]:
        """The numbers of each parameter's step; capturable: rows of tensors on the device."""
        if group.get("capturable") and self.counts:
            return self._counted_on_device(group, params)
        found: dict[Tensor, Any] = {}
        known: dict[Any, Any] = {}
        for param in params:
            turn = self.turn(param)
            key = turn, param.device if group.get("capturable") else None
            if key not in known:
                known[key] = self.numbers(group, turn)
                if group.get("capturable"):
                    known[key] = on_device(known[key], 1, param.device)[0]
            found[param] = known[key]
        return found

    def _counted_on_device(
        self, group: dict[str, Any], params: Sequence[Tensor]
    ) -> dict[Tensor, Any]:
        found: dict[Tensor, Any] = {}
        for device in {param.device for param in params}:
            own = [param for param in params if param.device == device]
            steps = [self.counter(param, device) for param in own]
            torch._foreach_add_(steps, 1)
            numbers = self.numbers(group, torch.stack(steps).double())
            found.update(zip(own, on_device(numbers, len(own), device), strict=True))
        return found

    def _of(self, param: Tensor) -> Beside:
        return self.__dict__.get("_beside", {}).get(param, PLAIN)

    def _masters(self) -> set[Tensor]:
        return {param for param, own in self.__dict__.get("_beside", {}).items() if own.any}

    def _first_states(self, param: Tensor, names: tuple[str, ...]) -> None:
        for name in names:
            state = self.state[param]
            if state.get(name) is None:
                compressor, _ = self.compressor(param, name)
                state[name] = _zeros(compressor, param)

    def _add(
        self, entries: list[Entry], param: Tensor, names: tuple[str, ...], numbers: Any
    ) -> None:
        state = self.state[param] if names else {}
        compressors = [self.compressor(param, name)[0] for name in names]
        payloads = [_as_payload(state[name]) for name in names]
        entry = self.entry(param, payloads, compressors, numbers)
        if entry is not None:
            entries.append(entry._replace(beside=self._of(param)))
            return
        # A combination without a fused kernel: its states exist in float32 for a moment.
        why = f"{compressors} have no fused kernel, their states move at each step"
        cuda_graph.refuse(type(self).__name__, why)
        whole = [
            layout.unpack(compressor, state[name], param, moment_dtype(param))
            for name, compressor in zip(names, compressors, strict=True)
        ]
        entry = self.entry(
            param, [{"tensor": local(x)} for x in whole], [Identity()] * len(names), numbers
        )
        _run([entry._replace(beside=self._of(param))] if entry is not None else [])
        layout.count_rounding(state, compressors)
        for name, compressor, x in zip(names, compressors, whole, strict=True):
            key = layout.state_key(self, compressor, param, name, state)
            state[name] = layout.pack(compressor, x, key)

    def check_saved(self, param: Tensor, values: dict[str, Any]) -> None:
        """Raise `ValueError` where a state is missing or has another shape."""
        counter = ("step",) if self.counts else ()
        missing = [name for name in (*self.names, *counter) if name not in values]
        if values and missing:
            raise ValueError(
                f"the states of a parameter of shape {tuple(param.shape)} lack {missing}; "
                f"found: {sorted(values)}"
            )
        for name in self.names:
            value = values.get(name)
            if isinstance(value, Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"state {name!r} has shape {tuple(value.shape)}, its parameter "
                    f"{tuple(param.shape)}"
                )

    def _load_plain(self, param: Tensor, name: str, value: Tensor) -> Any:
        # The kernels read exact states as contiguous float32, whatever the checkpoint holds.
        whole = value.detach().to(param.device, moment_dtype(param), copy=True).contiguous()
        return super()._load_plain(param, name, whole)


def _run(entries: Sequence[Entry], kept: Kept | None = None) -> None:
    if cpu.is_dataless():  # the kernels' tables hold addresses, which fake tensors have not
        return
    adamw.adamw_step([e for e in entries if isinstance(e, adamw.Entry)], kept)
    blockstep.block_step([e for e in entries if isinstance(e, blockstep.Entry)], kept)


def _as_payload(value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"tensor": local(value)} if isinstance(value, Tensor) else value


def _zeros(compressor: Compressor, param: Tensor) -> Tensor | dict[str, Tensor]:
    """The payload of zeros; where a payload of zeros is one, without a whole state in between."""
    dtype, shape = moment_dtype(param), local(param).shape
    if compressor.is_identity:
        return sharded_like(torch.zeros(shape, dtype=dtype, device=param.device), param)
    if compressor.zeros_from_zeros:
        like = torch.empty(shape, dtype=dtype, device="meta")
        parts = layout.pack(compressor, like)
        if isinstance(parts, dict):
            return {k: torch.zeros_like(t, device=param.device) for k, t in parts.items()}
    return layout.pack(compressor, torch.zeros(shape, dtype=dtype, device=param.device))


def moment_dtype(param: Tensor) -> torch.dtype:
    """The states' dtype: float32, and float64 for float64 parameters."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def block_bits(compressor: Compressor, *, signed: bool) -> int | None:
    """The width of `kernels.step.blockstep` that serves a compressor (32: identity), or None."""
    if compressor.is_identity:
        return blockstep.EXACT
    if not isinstance(compressor, Block) or compressor.signed != signed:
        return None
    bits, map = compressor.bits, compressor.map
    size = blockstep.BLOCKS.get(bits)
    # Equal to the plain one: any option that the kernels do not know keeps it out.
    if size is None or compressor != Block(block_size=size, map=map, bits=bits, signed=signed):
        return None
    return None if bits == 8 and map not in blockstep.MAPS8 else bits
