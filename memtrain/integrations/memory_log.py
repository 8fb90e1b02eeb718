"""Logs of training memory: peak, predicted peak, and bytes by kind."""

import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memtrain.audit.live_storages import storage_nbytes
from memtrain.optim.state_report import state_bytes
from memtrain.optim.states.first_step import inner_optimizer
from memtrain.wrapped import ATTRIBUTE, plan_of


class MemoryLog:
    """Measures training memory for the framework's logger (tensorboard, wandb, ...).

    A loop calls `measure` and logs the result. `follow` is for transformers' Trainer, `callback`
    for Lightning. `predicted` is the peak from before `wrap`:
    `memtrain.estimate(model, batch, cfg).peak.nbytes`; None: it is not logged.

    Example:
        >>> import memtrain
        >>> model = nn.Linear(256, 64)
        >>> model, optimizer = memtrain.wrap(model, torch.optim.AdamW(model.parameters()))
        >>> log = MemoryLog(predicted=10**6)
        >>> model(torch.ones(64, 256)).sum().backward()
        >>> optimizer.step()
        >>> found = log.measure(model, optimizer)
        >>> found["memtrain/weights"], found["memtrain/predicted_peak"]
        (65792, 1000000)
    """

    def __init__(self, predicted: int | None = None) -> None:
        self.predicted = predicted
        self._restart()

    def measure(self, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, int]:
        """Return bytes by name for a model, wrapped or not, and its optimizer.

        `peak` is that of torch's allocator since the last call on CUDA, else that of the process
        since its start (not on Windows). `activations` are the saved tensors of a wrapped model's
        last recorded forward. `gradients` are the current ones: none after `zero_grad`.
        """
        params = list(model.parameters())
        found: dict[str, int | None] = {
            "peak": self._peak(),
            "predicted_peak": self.predicted,
            "weights": storage_nbytes(params),
            "gradients": storage_nbytes([p.grad for p in params if p.grad is not None]),
        }
        if optimizer is not None:
            found["states"] = state_bytes(inner_optimizer(optimizer))
        if hasattr(model, ATTRIBUTE):
            entries = plan_of(model).entries("activation")
            found["activations"] = sum(entry.planned for entry in entries)
        self._restart()
        return {f"memtrain/{name}": size for name, size in found.items() if size is not None}

    def follow(self, trainer: Any) -> None:
        """Add the numbers to all logs and to `state.log_history` of transformers' Trainer."""
        from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

        def on_log(
            _: Any, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any
        ) -> None:
            if logs is not None and "loss" in logs:
                found = self.measure(kw["model"], kw.get("optimizer"))
                logs.update(found)
                state.log_history[-1].update(found)

        follower = type("MemoryLogCallback", (TrainerCallback,), {"on_log": on_log})()
        trainer.callback_handler.callbacks.insert(0, follower)  # before the reporters

    def callback(self) -> Any:
        """Return a `lightning.pytorch.Callback` that logs the numbers after each batch."""
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

        def after_batch(_: Any, trainer: Any, pl_module: Any, *args: Any) -> None:
            found = self.measure(pl_module, (*trainer.optimizers, None)[0])
            pl_module.log_dict({name: float(size) for name, size in found.items()})

        return type("MemoryLogCallback", (Callback,), {"on_train_batch_end": after_batch})()

    def _peak(self) -> int | None:
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        if sys.platform == "win32":
            return None
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def _restart(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
