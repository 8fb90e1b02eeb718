"""One run: a model, its optimizer and a step counter, advanced step by step."""

import math
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from memtrain import api
from memtrain.activations.adaptive.gact import GactAdapter
from memtrain.audit.live_storages import LiveStorages, storage_nbytes
from memtrain.audit.live_tensors import gradient_tensors, state_tensors, weight_tensors
from memtrain.audit.peak import StepOptions
from memtrain.config import sources as base
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.planner import Fit, fit
from memtrain.training.data import Images, Text
from memtrain.training.networks import build_model
from memtrain.training.settings import OptimizerConfig, TrainConfig

BYTES = ("weights", "gradients", "states", "saved", "peak")
"""Quantities counted on a real step: parameters and buffers, `.grad` after the backward, what the
optimizer holds, what the forward and the loss leave alive besides the loss, and the most alive at
once at any moment, temporaries included."""


class Metrics(NamedTuple):
    """One line of metrics.csv."""

    run: str
    step: int
    """Steps done: 0 is before the first."""
    split: str
    loss: float
    lr: float | None
    """None for validation."""
    seconds: float | None
    """Of the step; None where bytes were counted, and for validation."""
    tokens: int
    """Tokens or images of the step, or of the validation."""


class Run:
    """A plain or wrapped training run.

    Args:
        name: `"plain"` or `"wrapped"`.
        config: The whole config.
        source: Gives the batches.
        fit: The wrapped run's plan, where a budget made one before.

    Raises:
        ValueError: For a model, optimizer, plan or device that the config gets wrong, or a budget
            that nothing fits.
    """

    def __init__(
        self, name: str, config: TrainConfig, source: Text | Images, fit: Fit | None = None
    ) -> None:
        self.name, self.config, self.source = name, config, source
        self.device = pick_device(config.training.device)
        self._adapter: GactAdapter | None = None
        model = build_model(config.model, config.seed, source.kind).to(self.device)
        optimizer = build_optimizer(config.optimizer, model)
        if name == "wrapped":
            own = base.from_mapping(OmegaConf.create(asdict(config)))
            if own.gradients == "release" and own.release.clip == "none" and config.training.clip:
                # no gradient is left to clip after backward
                own.release = base.Release(clip="previous", limit=config.training.clip)
            fit = fit or self._fit(model, optimizer, own)
            model, optimizer = api.wrap(model, optimizer, own if fit is None else fit.plan.config)
            bits = api.plan_of(model).bits
            if bits is not None and own.activations.sensitivity == "passes":
                self._adapter = api.adapter(model)
        self.fit = fit if name == "wrapped" else None
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.step = 0
        self.bytes = dict.fromkeys(BYTES, 0)
        """The highest seen of each of `BYTES`."""
        self.rows: list[Metrics] = []

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.config.training.steps

    @property
    def kept(self) -> int:
        """Bytes of weights, gradients, states and saved activations together."""
        return sum(nbytes for name, nbytes in self.bytes.items() if name != "peak")

    def train_step(self) -> Metrics:
        """Do one optimizer step.

        Returns:
            Its metrics.

        Raises:
            FloatingPointError: If the loss is NaN or infinite.
        """
        training, rate = self.config.training, self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = self._batch("train", self.step, training.batch)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        # The second step, and so on: the first still creates states and tables.
        metered = is_due(self.step - min(1, training.steps - 1), training.meter_every)
        start = time.perf_counter()
        if self._adapter is not None:
            self._adapter.step(lambda: self._loss(inputs, targets).backward())
        loss = (self._metered if metered else self._update)(inputs, targets)
        seconds = time.perf_counter() - start
        self.step += 1
        tokens = targets.numel()
        row = Metrics(
            self.name, self.step, "train", loss, rate, None if metered else seconds, tokens
        )
        self.rows.append(row)
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.name}: the loss is {loss} at step {self.step}")
        return row

    @torch.no_grad()
    def validate(self) -> Metrics:
        """The mean loss of `eval_batches` validation batches, the same ones every time."""
        training, total, tokens = self.config.training, 0.0, 0
        self.model.eval()
        for index in range(training.eval_batches):
            inputs, targets = self._batch("validation", index, training.batch)
            total += self._loss(inputs, targets).item() * targets.numel()
            tokens += targets.numel()
        row = Metrics(self.name, self.step, "validation", total / tokens, None, None, tokens)
        self.rows.append(row)
        return row

    def state(self) -> dict[str, Any]:
        """Everything that continues this run to the last bit, as plain dicts."""
        wrapped = self.name == "wrapped"
        return {
            "run": self.name,
            "step": self.step,  # also the position in the data, and in the learning rate's schedule
            "lr": self._rate(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memtrain": api.state_dict(self.model) if wrapped else {},
            "rng": random_state(),
            "bytes": dict(self.bytes),
            "rows": [list(row) for row in self.rows],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.name == "wrapped":
            api.load_state_dict(self.model, state["memtrain"])
        self.step = state["step"]
        self.bytes = dict(state["bytes"])
        self.rows = [Metrics(*row) for row in state["rows"]]
        set_random_state(state["rng"])

    def summary(self) -> dict[str, Any]:
        """Bytes, median step time, speed and last losses of the steps done."""
        train = [row for row in self.rows if row.split == "train"]
        validation = [row for row in self.rows if row.split == "validation"]
        timed = [row for row in train if row.seconds]
        seconds = statistics.median(row.seconds or 0.0 for row in timed) if timed else None
        speed = (
            statistics.median(r.tokens / r.seconds for r in timed if r.seconds) if timed else None
        )
        return {
            "bytes": {**self.bytes, "total": self.kept},
            "steps": self.step,
            "step_seconds": seconds,
            f"{self.source.kind}_per_second": speed,
            # one batch is noisy: the mean of the last tenth
            "train_loss": _mean([row.loss for row in train[-max(1, len(train) // 10) :]]),
            "validation_loss": validation[-1].loss if validation else None,
        }

    def _fit(self, model: nn.Module, optimizer: torch.optim.Optimizer, own: Any) -> Fit | None:
        """The plan whose peak fits the budget; None without a budget."""
        if self.config.budget is None:
            return None
        inputs, _ = self._batch("train", 0, self.config.training.batch)
        autocast = torch.bfloat16 if self.config.training.autocast else None
        goal = self.config.planner.goal(StepOptions(autocast=autocast, loss=_zero_targets_loss))
        return fit(model, optimizer, inputs, self.config.budget, own, goal=goal)

    def _rate(self) -> float:
        training = self.config.training
        return learning_rate(
            self.step,
            peak=self.config.optimizer.lr,
            warmup=training.warmup,
            steps=training.steps,
            final=training.final_lr,
        )

    def _batch(self, split: str, index: int, size: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.source.batch(split, index, size)
        return inputs.to(self.device), targets.to(self.device)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        cast: AbstractContextManager[Any] = nullcontext()
        if self.config.training.autocast:
            cast = torch.autocast(self.device.type, torch.bfloat16)
        with cast:
            return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

    def _apply(self) -> None:
        """Clip and step, from the gradients that are there."""
        if self.config.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        self.optimizer.step()

    def _update(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self._loss(inputs, targets)
        loss.backward()
        self._apply()
        return loss.item()

    def _metered(self, inputs: Tensor, targets: Tensor) -> float:
        """`_update` with its bytes counted; the arithmetic is the same."""
        weights, states = weight_tensors(self.model), state_tensors(self.optimizer)
        with LiveStorages(peak=True) as live:
            live.adopt([*weights, *states])
            loss = self._loss(inputs, targets)
            saved = live.nbytes(exclude=[loss, *weights, *states])
            del states  # a compressed optimizer replaces them; the old ones must be free to go
            loss.backward()
            gradients = storage_nbytes(gradient_tensors(self.model))
            self._apply()
        now = (
            storage_nbytes(weights),
            gradients,
            storage_nbytes(state_tensors(self.optimizer)),
            saved,
            live.peak_nbytes,
        )
        for name, nbytes in zip(BYTES, now, strict=True):
            self.bytes[name] = max(self.bytes[name], nbytes)
        return loss.item()


def _zero_targets_loss(output: Any) -> Tensor:
    targets = torch.zeros(output.shape[:-1], dtype=torch.long, device=output.device)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Raises:
        ValueError: If CUDA is asked for and not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device=cuda, but torch sees no CUDA device; allowed: auto, cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def is_due(step: int, every: int) -> bool:
    """Whether something with a period of `every` steps (0: never) falls on this step."""
    return every > 0 and step % every == 0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW or SGD with momentum; biases and norms get no weight decay.

    Args:
        config: Names the optimizer and its numbers.
        model: Its parameters are optimised.

    Returns:
        A plain torch optimizer.

    Example:
        >>> build_optimizer(OptimizerConfig(name="sgd"), nn.Linear(2, 2)).defaults["momentum"]
        0.9
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    first, second = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps)


def learning_rate(step: int, *, peak: float, warmup: int, steps: int, final: float) -> float:
    """A linear warm-up, then a cosine down to a fraction of the peak.

    Args:
        step: From 0.
        peak: Reached at the warm-up's last step.
        warmup: Steps of the warm-up.
        steps: Steps of the whole run.
        final: The rate after the last step, as a fraction of the peak.

    Returns:
        The rate of this step.

    Example:
        >>> [learning_rate(s, peak=1.0, warmup=2, steps=4, final=0.0) for s in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))
