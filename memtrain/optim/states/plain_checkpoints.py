"""Checks of checkpoints whose states are plain tensors."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.compressors import state_parts
from memtrain.optim.states.layout import is_packed
from memtrain.optim.states.optimizer_hooks import innermost
from memtrain.optim.states.shards import local


def refuse_subclasses(values: dict[str, Any]) -> None:
    """Raise `ValueError` for a quantized tensor of another library, such as torchao's."""
    for name, value in values.items():
        if hasattr(local(value), "dequantize") and type(local(value)) not in (Tensor, nn.Parameter):
            raise ValueError(
                f"state {name!r} is a {type(local(value)).__name__} of another library; allowed: "
                "plain tensors, such as its dequantize(torch.float32)"
            )


def refuse_payloads(optimizer: Optimizer) -> Any:
    """Make a plain optimizer refuse checkpoints with compressed states; return the hook's handle.

    Wrappers around the optimizer run the hook too.
    """
    return optimizer.register_load_state_dict_pre_hook(_check_plain)


def _check_plain(optimizer: Any, loaded: dict[str, Any]) -> None:
    optimizer, known = innermost(optimizer), state_parts()
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=False):
        for number, param in zip(saved["params"], group["params"], strict=False):
            values = loaded["state"].get(number, {})
            refuse_subclasses(values)
            for name, value in values.items():
                if is_packed(value, known):
                    raise ValueError(
                        f"state {name!r} of a parameter of shape {tuple(param.shape)} holds the "
                        f"payload {sorted(value)}, but the states of this "
                        f"{type(optimizer).__name__} are plain: load it under the config that "
                        "saved it; memtrain.optim.portable_state_dict then gives one for any"
                    )
