"""One run: a model, its optimizer and a step counter, advanced step by step."""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from memtrain import api
from memtrain.activations.adaptive.gact import GactAdapter
from memtrain.activations.trace.compiled_parts import compile_in_place
from memtrain.audit.allocations import Allocations
from memtrain.audit.live_storages import LiveStorages, storage_nbytes
from memtrain.audit.live_tensors import gradient_tensors, state_tensors, weight_tensors
from memtrain.audit.peak import Moment, StepOptions
from memtrain.audit.peak.predict import UnpredictableError
from memtrain.compressors.base import Key
from memtrain.config import sources as base
from memtrain.config.sizes import parse_size
from memtrain.integrations.framework import by_norm
from memtrain.kernels.random.generators import random_state, set_random_state
from memtrain.plan.entries import weight_dtype
from memtrain.planner import Fit
from memtrain.training.batches import Batch, count, learned, loss_of, moved
from memtrain.training.data import Source
from memtrain.training.float32_products import bfloat16_products_are_slow
from memtrain.training.forecast import LongestStep, with_sums
from memtrain.training.networks import build_model
from memtrain.training.processes import ALONE, Processes, replicate, shard, unsynchronised
from memtrain.training.recipe import build_optimizer, learning_rate
from memtrain.training.rows import Rows
from memtrain.training.settings import TrainConfig

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
        processes: Those that train together.
        foretell: Predict the peak of a step on the longest batch, where no budget does.
        weights: A folder of a checkpoint, whose weights the model begins with.

    Raises:
        ValueError: For a model, optimizer, plan or device that the config gets wrong, or a budget
            that nothing fits.
    """

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        source: Source,
        fit: Fit | None = None,
        *,
        processes: Processes = ALONE,
        foretell: bool = False,
        weights: Path | None = None,
    ) -> None:
        self.name, self.config, self.source, self.processes = name, config, source, processes
        self.device = pick_device(config.training.device)
        self.micro = micro_rows(config, processes)
        """Rows of a microbatch of this process."""
        self._adapter: GactAdapter | None = None
        model = build_model(config.model, config.seed, source.kind, weights).to(self.device)
        optimizer = build_optimizer(config.optimizer, model)
        own = self._own() if name == "wrapped" else None
        self._compile(model)
        self.fit = (fit or self._fit(model, optimizer, own)) if own is not None else None
        """The plan for a budget."""
        own = own if self.fit is None else self.fit.plan.config
        self.forecast: Moment | None = None
        """The moment when most is alive in a step on the longest batch, predicted."""
        self.unpredictable = ""
        """Why it is not."""
        if foretell or self.fit is not None:
            self._foretell(model, optimizer, own)
        if config.training.parallel == "fsdp":
            shard(model, None if own is None else weight_dtype(own))
            optimizer = build_optimizer(config.optimizer, model)  # the parameters are new
        if own is not None:
            model, optimizer = api.wrap(model, optimizer, own)
            self._adapt(model, own)
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self._replica: nn.Module | None = None
        if processes.world > 1:
            self._replica = replicate(model) if config.training.parallel == "ddp" else None
            # replicas drop elements of their own
            torch.manual_seed(Key(seed=config.seed, rank=processes.rank).bits())
        self.step = 0
        self.best: tuple[float, int] | None = None
        """The least validation loss after a step, and that step."""
        self.waited = 0
        """Validations since then."""
        self.bytes = dict.fromkeys(BYTES, 0)
        """The highest seen of each of `BYTES`."""
        self.rows: list[Metrics] = []

    @property
    def called(self) -> nn.Module:
        """The module that a step calls: the model, or DistributedDataParallel around it."""
        return self._replica or self.model

    @property
    def slow_products(self) -> bool:
        """Whether it has bfloat16 products, on a processor where float32's are faster."""
        half = any(p.dtype == torch.bfloat16 for p in self.model.parameters())
        half |= self.config.training.autocast
        return half and bfloat16_products_are_slow(self.device)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the validation loss has stopped falling."""
        patience = self.config.training.patience
        return self.step >= self.config.training.steps or 0 < patience <= self.waited

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
        batches = self._batches("train", self.step)
        self.called.train()
        self.optimizer.zero_grad(set_to_none=True)
        # The second step, and so on: the first still creates states and tables.
        metered = is_due(self.step - min(1, training.steps - 1), training.meter_every)
        start = time.perf_counter()
        if self._adapter is not None:
            self._adapter.step(lambda: self._loss(batches[0]).backward())
        loss = (self._metered if metered else self._update)(batches)
        seconds = time.perf_counter() - start
        self.step += 1
        tokens = int(self.processes.total(sum(map(count, batches))))
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
        total, targets, tokens = 0.0, 0, 0
        self.called.eval()
        for index in range(self.validations):
            for batch in self._batches("validation", index):
                own = learned(batch)
                total += self._loss(batch).item() * own
                targets += own
                tokens += count(batch)
        total, targets, tokens = map(self.processes.total, (total, targets, tokens))
        row = Metrics(self.name, self.step, "validation", total / targets, None, None, int(tokens))
        self.rows.append(row)
        if self.step:
            better = self.best is None or row.loss < self.best[0]
            self.best = (row.loss, self.step) if better else self.best
            self.waited = 0 if better else self.waited + 1
        return row

    @property
    def validations(self) -> int:
        """Batches of a validation; 0 where no data are held out."""
        asked = self.config.training.eval_batches
        if not isinstance(self.source, Rows):
            return asked
        return min(asked, self.source.batches("validation", self.config.training.batch))

    def state(self) -> dict[str, Any]:
        """Everything that continues this run to the last bit, as plain dicts."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.progress(),
        }

    def progress(self) -> dict[str, Any]:
        """Entries of `state` besides the model and its optimizer."""
        wrapped = self.name == "wrapped"
        return {
            "run": self.name,
            "step": self.step,  # also the position in the data, and in the learning rate's schedule
            "lr": self._rate(),
            "best": self.best,
            "waited": self.waited,
            "memtrain": api.state_dict(self.model) if wrapped else {},
            "rng": random_state(),
            "bytes": dict(self.bytes),
            "rows": [list(row) for row in self.rows],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_progress(state)

    def load_progress(self, state: dict[str, Any]) -> None:
        """Continue from what `progress` gave; model and optimizer have been loaded."""
        best = state.get("best")  # checkpoints of 0.1 have none
        self.best, self.waited = best and (best[0], best[1]), state.get("waited", 0)
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
            f"{self.source.unit}_per_second": speed,
            # one batch is noisy: the mean of the last tenth
            "train_loss": _mean([row.loss for row in train[-max(1, len(train) // 10) :]]),
            "validation_loss": validation[-1].loss if validation else None,
        }

    @property
    def _buckets(self) -> bool:
        """Whether DistributedDataParallel's buckets hold, and add up, all gradients."""
        return self.processes.world > 1 and self.config.training.parallel == "ddp"

    def _own(self) -> base.Config:
        """Memtrain's own part of the config, with the run's clipping and accumulation in it."""
        training = self.config.training
        own = base.from_mapping(OmegaConf.create(asdict(self.config)))
        if self.config.compile != "false":
            _check_compiled(self.config.compile, own)
        released = own.gradients == "release"
        released |= self.config.budget is not None and "release" in self.config.planner.allow
        if released and own.release.clip == "none" and training.clip:
            # no gradient is left to clip after backward
            own.release = replace(own.release, clip=by_norm(own), limit=training.clip)
        if released and own.release.accumulate == 1 and not self._buckets:
            own.release = replace(own.release, accumulate=training.accumulate)
        return own

    def _compile(self, model: nn.Module) -> None:
        """Compile a model as the config says, before it is wrapped and put into replicas."""
        how, source = self.config.compile, self.source
        if how != "false":
            torch.compiler.reset()  # a run before this one has graphs of the same code
            # Either value keeps graphs from depending on the lengths that came before, as torch's
            # own choice does: a run that is resumed begins with other ones.
            ragged = isinstance(source, Rows) and source.ragged
            compile_in_place(model, how, dynamic=ragged)

    def _adapt(self, model: nn.Module, own: Any) -> None:
        """Prepare to adapt widths of bits, where they are automatic.

        Raises:
            ValueError: If they are and the model is compiled.
        """
        if api.plan_of(model).bits is None:
            return
        if self.config.compile != "false":
            raise ValueError(
                f"compile={self.config.compile} with bits: auto in activations: they stay what "
                "they were when a graph was compiled; allowed: compile=false, or numbers of bits"
            )
        if own.activations.sensitivity == "passes":
            self._adapter = api.adapter(model)

    def _fit(self, model: nn.Module, optimizer: torch.optim.Optimizer, own: Any) -> Fit | None:
        """The plan whose peak fits the budget; None without a budget."""
        if self.config.budget is None:
            return None
        step, budget = self._longest_step(), parse_size(self.config.budget, "budget")
        return step.fit(model, optimizer, own, self.config.planner.goal(step.options), budget)

    def _foretell(self, model: nn.Module, optimizer: torch.optim.Optimizer, own: Any) -> None:
        step = self._longest_step()
        if self.fit is not None:
            self.forecast = with_sums(self.fit.peak, step.sums(model, own))
            return
        try:
            self.forecast = step.peak(model, optimizer, own)
        except UnpredictableError as error:
            self.unpredictable = str(error)

    def _longest_step(self) -> LongestStep:
        training = self.config.training
        options = StepOptions(
            autocast=torch.bfloat16 if training.autocast else None,
            loss=None if isinstance(self.source, Rows) else _zero_targets_loss,
            accumulated=training.accumulate > 1 or self._buckets,
        )
        return LongestStep(
            arguments=self.longest(),
            options=options,
            buckets=self._buckets,
            sharded=training.parallel == "fsdp",
        )

    def longest(self) -> Any:
        """Arguments of the model for the longest microbatch."""
        if isinstance(self.source, Rows):
            return moved(self.source.longest(self.micro), self.device)
        batch = self._batches("train", 0)[0]
        return batch if isinstance(batch, dict) else batch[0]

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
        """This process's microbatches of a batch."""
        size, parts = self.config.training.batch, self.config.training.accumulate
        places = [self.processes.part(size, number, parts) for number in range(parts)]
        found = [self.source.batch(split, index, size, part) for part in places]
        return [moved(batch, self.device) for batch in found]

    def _loss(self, batch: Batch) -> Tensor:
        cast: AbstractContextManager[Any] = nullcontext()
        if self.config.training.autocast:
            cast = torch.autocast(self.device.type, torch.bfloat16)
        with cast:
            return loss_of(self.called, batch)

    def _backward(
        self, batches: list[Batch], forwarded: Callable[[Tensor], None] = lambda loss: None
    ) -> list[tuple[Tensor, float]]:
        """Forward and backward of each microbatch.

        Args:
            batches: Of this process.
            forwarded: Is given each loss before its backward.

        Returns:
            Each loss, and its share in the step's: that of its targets in those of all processes.
        """
        targets = [learned(batch) for batch in batches]
        world, total = self.processes.world, self.processes.total(sum(targets))
        losses = []
        for number, (batch, own) in enumerate(zip(batches, targets, strict=True), 1):
            with unsynchronised(self.called, last=number == len(batches)):
                loss = self._loss(batch)
                forwarded(loss)
                share = own / total
                # processes' gradients are averaged, not added up
                (loss if share == 1 else loss * (share * world)).backward()
            losses.append((loss.detach(), share))
        return losses

    def _apply(self) -> None:
        """Clip and step, from the gradients that are there."""
        if self.config.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        self.optimizer.step()

    def _value(self, losses: list[tuple[Tensor, float]]) -> float:
        """The mean loss over the step's targets."""
        return self.processes.total(sum(loss.item() * share for loss, share in losses))

    def _update(self, batches: list[Batch]) -> float:
        losses = self._backward(batches)
        self._apply()
        return self._value(losses)

    def _metered(self, batches: list[Batch]) -> float:
        """`_update` with its bytes counted; the arithmetic is the same."""
        weights = weight_tensors(self.model)
        older = [*weights, *state_tensors(self.optimizer)]
        # a mode that sees every op would keep torch.compile out
        eager = self.config.compile == "false"
        with LiveStorages(peak=True) if eager else Allocations(self.device) as live:
            live.adopt(older)
            saved: list[int] = []

            def forwarded(loss: Tensor) -> None:
                if not saved:  # later ones would find gradients
                    saved.append(live.nbytes(exclude=[loss, *older]))
                # a compressed optimizer replaces states; the old ones must be free to go
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
        return self._value(losses)


def _check_compiled(how: str, own: base.Config) -> None:
    """Refuse what needs to see the ops of a forward.

    Raises:
        ValueError: Names both keys.
    """
    recompute = list(own.activations.recompute)
    if recompute:
        raise ValueError(
            f"compile={how} with activations.recompute={recompute}: modules that run again are not "
            "traced; allowed: compile=false, or activations.recompute=[]"
        )
    if own.precision.active:
        raise ValueError(
            f"compile={how} with precision.assignment={own.precision.assignment}: ops inside a "
            "graph are not rounded; allowed: compile=false, or precision=fp32"
        )


def micro_rows(config: TrainConfig, processes: Processes) -> int:
    """Rows of a microbatch.

    Raises:
        ValueError: If a batch cannot be divided evenly.
    """
    training = config.training
    micro, rest = divmod(training.batch, training.accumulate * processes.world)
    if rest:
        raise ValueError(
            f"training.batch={training.batch} is no multiple of training.accumulate="
            f"{training.accumulate} times {processes.world} processes"
        )
    return micro


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
