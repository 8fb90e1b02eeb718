"""One run: a model, its optimizer and a step counter, advanced step by step."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from memtrain import api
from memtrain.activations.adaptive.gact import GactAdapter
from memtrain.audit.allocations import Allocations
from memtrain.audit.live_storages import LiveStorages, storage_nbytes
from memtrain.audit.live_tensors import gradient_tensors, state_tensors, weight_tensors
from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.predict import UnpredictableError
from memtrain.config import sources as base
from memtrain.config.sizes import parse_size
from memtrain.integrations.framework import by_norm
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.planner import Fit
from memtrain.training import forecast
from memtrain.training.batches import Batch, count_targets, count_tokens, loss_of, to_device
from memtrain.training.networks import build_model, compile_in_place
from memtrain.training.recipe import build_optimizer, learning_rate
from memtrain.training.rows import Rows
from memtrain.training.settings import TrainConfig

BYTES = ("weights", "gradients", "states", "saved", "peak")
"""Quantities counted on a real step: parameters and buffers; `.grad` after the backward; optimizer
states; what the forward and the loss keep alive besides the loss; the most alive at any moment,
temporaries included."""


class Metrics(NamedTuple):
    """One row of metrics.csv."""

    run: str
    step: int
    """Steps done: 0 is before the first."""
    split: str
    loss: float
    lr: float | None
    """None for validation."""
    seconds: float | None
    """Time of the step; None where bytes were counted, and for validation."""
    tokens: int
    """Tokens or rows of the step, or of the validation."""


class Run:
    """The training run of the baseline (`plain`) or of the wrapped model.

    `fit` is a plan that was made for the budget before. With `predict`, the peak of a step is
    predicted also without a budget.
    """

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        source: Rows,
        fit: Fit | None = None,
        *,
        predict: bool = False,
    ) -> None:
        self.name, self.config, self.source = name, config, source
        self.device = pick_device(config.training.device)
        self.micro_rows = config.training.batch // config.training.accumulate
        """Rows per microbatch."""
        self._adapter: GactAdapter | None = None
        model = build_model(config.model, config.seed).to(self.device)
        optimizer = build_optimizer(config.optimizer, model)
        cfg = self._memtrain_config() if name == "wrapped" else None
        self._compile(model)
        self.fit = (fit or self._fit(model, optimizer, cfg)) if cfg is not None else None
        """The plan for a budget."""
        cfg = cfg if self.fit is None else self.fit.plan.config
        self.forecast: Moment | None = None
        """The predicted peak of a step."""
        self.unpredictable = ""
        """Why there is no prediction."""
        if predict or self.fit is not None:
            self._predict(model, optimizer, cfg)
        if cfg is not None:
            model, optimizer = api.wrap(model, optimizer, cfg)
            self._adapt(model, cfg)
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.step = 0
        self.bytes = dict.fromkeys(BYTES, 0)
        """The highest count of each of `BYTES`."""
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
        """Do one optimizer step and return its metrics."""
        training, rate = self.config.training, self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = self._batches("train", self.step)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        # The second step is the first that is metered: the first creates states and tables.
        metered = is_due(self.step - min(1, training.steps - 1), training.meter_every)
        start = time.perf_counter()
        if self._adapter is not None:
            self._adapter.step(lambda: self._loss(batches[0]).backward())
        loss = (self._metered if metered else self._update)(batches)
        seconds = time.perf_counter() - start
        self.step += 1
        tokens = sum(map(count_tokens, batches))
        row = Metrics(
            self.name, self.step, "train", loss, rate, None if metered else seconds, tokens
        )
        self.rows.append(row)
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.name}: the loss is {loss} at step {self.step}")
        return row

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Return the mean loss of `eval_batches` validation batches, the same ones every time."""
        total, targets, tokens = 0.0, 0, 0
        self.model.eval()
        for index in range(self.validations):
            for batch in self._batches("validation", index):
                count = count_targets(batch)
                total += self._loss(batch).item() * count
                targets += count
                tokens += count_tokens(batch)
        row = Metrics(self.name, self.step, "validation", total / targets, None, None, tokens)
        self.rows.append(row)
        return row

    @property
    def validations(self) -> int:
        """Batches of a validation; 0 where no data are held out."""
        requested = self.config.training.eval_batches
        return min(requested, self.source.batches("validation", self.config.training.batch))

    def state(self) -> dict[str, Any]:
        """Return everything that continues this run bit for bit, as plain dicts.

        Frozen parameters are left out: the model's folder or the seed gives them again.
        """
        frozen, weights = self._frozen(), self.model.state_dict()
        return {
            "run": self.name,
            "model": {key: x for key, x in weights.items() if key not in frozen},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,  # also the position in the data and in the schedule
            "memtrain": api.state_dict(self.model) if self.name == "wrapped" else {},
            "rng": random_state(),
            "bytes": dict(self.bytes),
            "rows": [list(row) for row in self.rows],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state`."""
        try:
            self._load(state)
        except (KeyError, TypeError, RuntimeError, AttributeError) as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"the checkpoint does not fit the run: {first}") from error

    def _load(self, state: dict[str, Any]) -> None:
        missing, unexpected = self.model.load_state_dict(state["model"], strict=False)
        wrong = sorted({*missing} - self._frozen()) + unexpected
        if wrong:
            raise ValueError(f"the checkpoint does not fit the model: {wrong[0]!r} differs")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.name == "wrapped":
            api.load_state_dict(self.model, state["memtrain"])
        self.step = state["step"]
        self.bytes = dict(state["bytes"])
        self.rows = [Metrics(*row) for row in state["rows"]]
        set_random_state(state["rng"])

    def _frozen(self) -> set[str]:
        parameters = self.model.named_parameters(remove_duplicate=False)
        return {name for name, p in parameters if not p.requires_grad}

    def summary(self) -> dict[str, Any]:
        """Return bytes, median step time, speed and last losses of the steps done."""
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
            f"{self.source.unit}_per_second": speed,
            # one batch is noisy: the mean of the last tenth
            "train_loss": _mean([row.loss for row in train[-max(1, len(train) // 10) :]]),
            "validation_loss": validation[-1].loss if validation else None,
        }

    def _memtrain_config(self) -> base.Config:
        """Return memtrain's config, with the run's clipping and accumulation in it."""
        training = self.config.training
        cfg = base.from_mapping(OmegaConf.create(asdict(self.config)))
        if self.config.compile != "false":
            _check_compiled(self.config.compile, cfg)
        released = cfg.gradients == "release"
        released |= self.config.budget is not None and "release" in self.config.planner.allow
        if released and cfg.release.clip == "none" and training.clip:
            # released gradients are gone after the backward: they are clipped within it
            cfg.release = replace(cfg.release, clip=by_norm(cfg), limit=training.clip)
        if released and cfg.release.accumulate == 1:
            cfg.release = replace(cfg.release, accumulate=training.accumulate)
        return cfg

    def _compile(self, model: nn.Module) -> None:
        """Compile a model as the config says, before it is wrapped."""
        how = self.config.compile
        if how != "false":
            torch.compiler.reset()  # an earlier run has graphs of the same code
            # A fixed `dynamic` keeps graphs from depending on earlier batches, which differ in a
            # resumed run.
            compile_in_place(model, how, dynamic=False)

    def _adapt(self, model: nn.Module, cfg: base.Config) -> None:
        """Prepare to adapt automatic widths of bits."""
        if api.plan_of(model).bits is None:
            return
        if self.config.compile != "false":
            raise ValueError(
                f"compile={self.config.compile} with bits: auto in activations: a compiled graph "
                "keeps the widths that it was compiled with; allowed: compile=false, or numbers of "
                "bits"
            )
        if cfg.activations.sensitivity == "passes":
            self._adapter = api.adapter(model)

    def _fit(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, cfg: base.Config
    ) -> Fit | None:
        """Return the plan whose peak fits the budget; None without a budget."""
        if self.config.budget is None:
            return None
        budget = parse_size(self.config.budget, "budget")
        goal = self.config.planner.goal(self._step_options())
        return forecast.fit_budget(model, optimizer, self._inputs(), cfg, goal, budget)

    def _predict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, cfg: base.Config | None
    ) -> None:
        if self.fit is not None:
            sums = forecast.accumulated_bytes(model, self.fit.plan.config)
            self.forecast = forecast.with_sums(self.fit.peak, sums)
            return
        try:
            self.forecast = forecast.predicted_peak(
                model, optimizer, self._inputs(), cfg, self._step_options()
            )
        except UnpredictableError as error:
            self.unpredictable = str(error)

    def _step_options(self) -> StepOptions:
        training = self.config.training
        return StepOptions(
            autocast=torch.bfloat16 if training.autocast else None,
            accumulated=training.accumulate > 1,
        )

    def _inputs(self) -> Any:
        """Return the model's arguments for a microbatch; all have the same shapes."""
        return to_device(self.source.collate([0] * self.micro_rows), self.device)

    def _rate(self) -> float:
        training = self.config.training
        return learning_rate(
            self.step,
            peak=self.config.optimizer.lr,
            warmup=training.warmup,
            steps=training.steps,
            final=training.final_lr,
        )

    def _batches(self, split: str, index: int) -> list[Batch]:
        """Return the microbatches of a batch."""
        size, rows = self.config.training.batch, self.micro_rows
        parts = [slice(start, start + rows) for start in range(0, size, rows)]
        found = [self.source.batch(split, index, size, part) for part in parts]
        return [to_device(batch, self.device) for batch in found]

    def _loss(self, batch: Batch) -> Tensor:
        cast: AbstractContextManager[Any] = nullcontext()
        if self.config.training.autocast:
            cast = torch.autocast(self.device.type, torch.bfloat16)
        with cast:
            return loss_of(self.model, batch)

    def _update(self, batches: list[Batch]) -> float:
        losses = self._backward(batches)
        self._apply()
        return sum(loss.item() * share for loss, share in losses)

    def _backward(
        self, batches: list[Batch], forwarded: Callable[[Tensor], None] = lambda loss: None
    ) -> list[tuple[Tensor, float]]:
        """Do forward and backward of each microbatch, weighted by its share of the step's targets.

        `forwarded` is called with each loss before its backward. Returns each loss and its share.
        """
        targets = [count_targets(batch) for batch in batches]
        losses = []
        for batch, count in zip(batches, targets, strict=True):
            loss, share = self._loss(batch), count / sum(targets)
            forwarded(loss)
            (loss if share == 1 else loss * share).backward()
            losses.append((loss.detach(), share))
        return losses

    def _apply(self) -> None:
        """Clip the gradients and step."""
        if self.config.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        self.optimizer.step()

    def _metered(self, batches: list[Batch]) -> float:
        """Do `_update` and count its bytes; the arithmetic is the same."""
        weights = weight_tensors(self.model)
        older = [*weights, *state_tensors(self.optimizer)]
        # LiveStorages' mode sees every op, which would disable torch.compile
        eager = self.config.compile == "false"
        with LiveStorages() if eager else Allocations(self.device) as live:
            live.adopt(older)
            saved: list[int] = []

            def forwarded(loss: Tensor) -> None:
                if not saved:  # gradients exist after the first microbatch
                    saved.append(live.nbytes(exclude=[loss, *older]))
                # a compressed optimizer replaces states; nothing here may keep the old ones
                older.clear()

            losses = self._backward(batches, forwarded)
            gradients = storage_nbytes(gradient_tensors(self.model))
            self._apply()
        now = (
            storage_nbytes(weights),
            gradients,
            storage_nbytes(state_tensors(self.optimizer)),
            saved[0],
            live.peak_nbytes,
        )
        for name, nbytes in zip(BYTES, now, strict=True):
            self.bytes[name] = max(self.bytes[name], nbytes)
        return sum(loss.item() * share for loss, share in losses)


def _check_compiled(how: str, cfg: base.Config) -> None:
    """Refuse options that must see the ops of a forward."""
    recompute = list(cfg.activations.recompute)
    if recompute:
        raise ValueError(
            f"compile={how} with activations.recompute={recompute}: recomputed modules are not "
            "traced; allowed: compile=false, or activations.recompute=[]"
        )
    if cfg.precision.active:
        raise ValueError(
            f"compile={how} with precision.assignment={cfg.precision.assignment}: ops inside a "
            "graph are not rounded; allowed: compile=false, or precision=fp32"
        )


def pick_device(name: str) -> torch.device:
    """Return a device by name; `auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("training.device=cuda, but torch sees no CUDA device; allowed: auto, cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def is_due(step: int, every: int) -> bool:
    """Return whether a period of `every` steps (0: never) ends at this step."""
    return every > 0 and step % every == 0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
