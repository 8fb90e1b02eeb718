"""Base of optimizers with compressed states: checkpoints, groups shared with the original."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from memtrain.compressors import state_parts
from memtrain.compressors.base import Compressor, Key
from memtrain.optim.states import checkpoint_options, layout, optimizer_hooks, rows
from memtrain.optim.states.checkpoint_options import KEY, numbered
from memtrain.optim.states.per_parameter import number_of, stands_for
from memtrain.optim.states.plain_checkpoints import check_options, refuse_subclasses, share_groups
from memtrain.optim.states.shards import is_sharded, part_number, placed_as
from memtrain.optim.states.stalled_weights import StalledWeights

FORMAT = 1  # of compressed states

NO_CAPTURE = (
    "memtrain's steps can't be captured in a CUDA graph; capture forward and backward, and call "
    "step outside"
)
"""A step computes numbers on the host, which a replay would not repeat."""

_TAKEN_OVER = ("step", "state_dict", "load_state_dict")
"""Methods that an original refuses: a checkpoint of it, which has no states, would lose them."""


class CompressedStates(Optimizer):
    """An optimizer whose `state` holds payloads: plain tensors and dicts of them.

    `original` is the wrapped torch optimizer, or None. Both share `param_groups`, so LR schedulers
    of the original keep working.
    """

    new_options: ClassVar[tuple[str, ...]] = ()
    """Options of groups that a checkpoint does not change."""
    original: Optimizer | None = None
    # What others had put in place of the original's methods, as a scheduler does.
    _methods: Mapping[str, Any] = dict.fromkeys(_TAKEN_OVER)
    choose: layout.Choose
    min_elements: int = -1
    """Parameters with at most this many elements keep their states."""
    copied_hooks: Any = None
    """Its `attach(optimizer)` is called with copies: torch copies no hooks."""

    def compressor(self, param: Tensor, name: str) -> tuple[Compressor, str]:
        """Return the compressor of a state, and the reason if it is not the chosen one."""
        param = stands_for(param)
        decided = self._decided.get(param)
        if decided is None:
            decided = self._decided[param] = {}
        if name not in decided:
            decided[name] = layout.decide(param, self.choose, name, self.min_elements)
        return decided[name]

    @cached_property
    def _decided(self) -> Any:
        return WeakIdKeyDictionary()

    def is_payload(self, param: Tensor, name: str, value: Any) -> bool:
        """Whether a state's value is what its compressor made."""
        return isinstance(value, dict) and layout.is_packed(
            value, self.compressor(param, name)[0].parts
        )

    def packed(
        self, param: Tensor, state: dict[str, Any], whole: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Compress some states of a parameter, whose present states are `state`.

        The key of stochastic rounding consists of the seed of `choose`, the parameter's number, the
        state's name and the step: it repeats in a resumed run, and differs at each step. If the
        optimizer counts no steps, `state` does.
        """
        found, counted = {}, False
        for name, value in whole.items():
            compressor, key = self.compressor(param, name)[0], Key()
            if compressor.rounding == "stochastic":
                if "step" not in state and not counted:
                    state[layout.STEP], counted = state.get(layout.STEP, 0) + 1, True
                key = self._key(param, name, int(state.get("step", state.get(layout.STEP, 0))))
            found[name] = layout.pack(compressor, value, key)
        return found

    def _key(self, param: Tensor, name: str, step: int) -> Key:
        site, call = number_of(self, param, self.param_groups), zlib.crc32(name.encode())
        seed, rank = getattr(self.choose, "seed", 0), part_number(param)
        return Key(seed, site=site, step=step, call=call, rank=rank)

    def unpacked(self, param: Tensor, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the states of a parameter as a plain optimizer has them, in `dtype` if given."""
        return {
            name: layout.unpack(self.compressor(param, name)[0], value, param, dtype)
            if self.is_payload(param, name, value)
            else value
            for name, value in self.state.get(param, {}).items()
        }

    def adopt(self, original: Optimizer) -> None:
        """Share `param_groups` and hooks with the original and clear its states."""
        self.original = original
        self.param_groups = original.param_groups
        self.defaults = original.defaults
        optimizer_hooks.share(self, original)
        original.state.clear()
        self._methods = refuse_methods(original, _TAKEN_OVER)

    def give_back(self) -> Optimizer | None:
        """Detach and return the original optimizer; restore its methods."""
        original, self.original = self.original, None
        if original is not None:
            restore_methods(original, self._methods)
        return original

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # pyright: ignore[reportAttributeAccessIssue]
        values = {"choose": self.choose, "min_elements": self.min_elements, "_stall": self._stall}
        for name in ("original", "copied_hooks"):
            if name in vars(self):
                values[name] = getattr(self, name)
        return {**state, **values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "copied_hooks" in state:  # not in what a checkpoint's loading gives
            self.copied_hooks.attach(self)

    @cached_property
    def _stall(self) -> StalledWeights:
        return StalledWeights()

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the compressed states bit for bit, and the format's number under `"memtrain"`.

        Returns:
            Plain dicts of plain tensors and numbers, which `torch.load(weights_only=True)` reads.
            torch's optimizers with a step counter refuse it; they load `portable_state_dict`.
            Payloads of sharded parameters are DTensors laid out by rows: any number of processes
            loads what `torch.distributed.checkpoint` saves.
        """
        return optimizer_hooks.saved(self, self, self._whole_state_dict)

    def _whole_state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["state"] = {**saved["state"], **self._states_by_rows(saved)}
        values = {**saved.get(KEY, {}), "states": FORMAT}
        return checkpoint_options.marked({**saved, KEY: values})

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load compressed states bit for bit, or a plain torch optimizer's, which are compressed.

        Raises:
            ValueError: If groups, options, the format or states do not fit. Nothing has changed.
        """
        groups, seen = self.param_groups, {}

        def remember(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            if (number := loaded.get(KEY, {}).get("states", FORMAT)) != FORMAT:
                raise ValueError(f"compressed states of format {number}; allowed: {FORMAT}")
            loaded = checkpoint_options.unmarked(checkpoint_options.without(loaded))
            if len(loaded["param_groups"]) != len(groups):
                return loaded  # which torch refuses
            for group in loaded["param_groups"]:
                options = {**self.defaults, **group}
                check_options(options, self.defaults)
                self.check(options)
            live, plain = self._checked(loaded)
            seen.update(live)
            return plain

        def finish(_: Optimizer) -> None:
            share_groups(self, groups)
            if self.original is not None:
                self.original.param_groups = groups
            self._restore_dtypes(seen)

        before = self.register_load_state_dict_pre_hook(remember)
        after = self.register_load_state_dict_post_hook(finish, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def check(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for a group's options that are out of range or not supported."""
        if group.get("differentiable"):
            raise ValueError(
                f"{type(self).__name__} has no differentiable: compressed states have no gradient"
            )
        if group.get("capturable"):
            raise ValueError(f"capturable=True: {NO_CAPTURE}; allowed: capturable=False")

    def check_saved(self, param: Tensor, values: dict[str, Any], group: dict[str, Any]) -> None:
        """Raise `ValueError` if states of one parameter cannot be loaded."""

    def _states_by_rows(self, saved: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the states of sharded parameters by rows, by the parameter's number."""
        found = {}
        for number, param, _ in numbered(self.param_groups, saved):
            if is_sharded(param):
                values = saved["state"][number].items()
                found[number] = {k: self._by_rows(param, k, value) for k, value in values}
        return found

    def _by_rows(self, param: Tensor, name: str, value: Any) -> Any:
        if not self.is_payload(param, name, value):
            return value
        compressor, _ = self.compressor(param, name)
        if rows.can_be_rows(compressor, param):
            return rows.to_rows(compressor, value, param)
        return layout.unpack(compressor, value, param, torch.float32)

    def _checked(self, loaded: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check a checkpoint before anything changes.

        Returns the checkpoint with payloads as they are in memory, and the checkpoint without
        payloads: torch would cast codes. `_restore_dtypes` adds the payloads.
        """
        live, plain = dict(loaded["state"]), dict(loaded["state"])
        for number, param, group in numbered(self.param_groups, loaded):
            refuse_subclasses(live[number])
            values = live[number] = {
                name: self._from_rows(param, name, value) for name, value in live[number].items()
            }
            self.check_saved(param, values, {**self.defaults, **group})
            for name, value in values.items():
                if self.is_payload(param, name, value) or layout.is_packed(value, state_parts()):
                    layout.check_payload(param, name, value, self.compressor(param, name)[0])
            plain[number] = {
                name: None if self.is_payload(param, name, value) else value
                for name, value in values.items()
            }
        return {**loaded, "state": live}, {**loaded, "state": plain}

    def _from_rows(self, param: Tensor, name: str, value: Any) -> Any:
        """Return a state as it is in memory; other values than payloads by rows are unchanged."""
        if not rows.is_rows(value) or not (is_sharded(param) or rows.only_rows(value)):
            return value
        compressor, _ = self.compressor(param, name)
        live = rows.from_rows(compressor, value, param)
        # Blocks of a parameter that is not split cross rows.
        return layout.pack(compressor, live) if isinstance(live, Tensor) else live

    def _restore_dtypes(self, loaded: dict[str, Any]) -> None:
        # Optimizer.load_state_dict casts every tensor, uint8 codes too, to the parameter's dtype.
        for number, param, _ in numbered(self.param_groups, loaded):
            for name, value in loaded["state"][number].items():
                if self.is_payload(param, name, value):
                    fresh = {k: t.detach().to(param.device, copy=True) for k, t in value.items()}
                    self.state[param][name] = fresh
                elif isinstance(value, Tensor) and name != "step" and value.shape == param.shape:
                    self.state[param][name] = self.load_plain(param, name, placed_as(value, param))
                elif isinstance(value, Tensor):  # a counter: torch would share it with the source
                    known = self.state[param][name]
                    dtype = known.dtype if name == "step" else value.dtype  # and cast all others
                    self.state[param][name] = value.detach().to(known.device, dtype, copy=True)

    def load_plain(self, param: Tensor, name: str, value: Tensor) -> Any:
        """Return a state of a plain optimizer as this optimizer keeps it; never the same memory."""
        value = value.detach().to(param.device, copy=True)
        if layout.eligible(param, value):
            return value
        return self.packed(param, {**self.state[param]}, {name: value})[name]


def _refuse_step(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "another optimizer has this optimizer's states: step, save and load the optimizer that "
        "memtrain.wrap (or memtrain.optim.compress) returned, or call unwrap (restore) first"
    )


_refuse_step._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]


def refuse_methods(optimizer: Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """Make methods of an optimizer raise; return what its instance had in their place."""
    methods = {name: vars(optimizer).get(name) for name in names}
    vars(optimizer).update(dict.fromkeys(names, _refuse_step))
    return methods


def restore_methods(optimizer: Optimizer, methods: Mapping[str, Any]) -> None:
    """Undo `refuse_methods`."""
    for name, method in methods.items():
        vars(optimizer).pop(name, None)
        if method is not None:
            setattr(optimizer, name, method)


def is_taken_over(optimizer: Optimizer) -> bool:
    """Whether another optimizer has this optimizer's states."""
    return vars(optimizer).get("step") is _refuse_step


def on_each(param_groups: list[dict[str, Any]]) -> list[tuple[Tensor, dict[str, Any], str]]:
    """Return every parameter with its group and its name or `group.index`."""
    found = []
    for g, group in enumerate(param_groups):
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            found.append((param, group, names[i] if names else f"{g}.{i}"))
    return found


def refuse_capture() -> None:
    """Raise `RuntimeError` while a CUDA graph captures the current stream."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(NO_CAPTURE)


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a step's closure, with gradients on."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
