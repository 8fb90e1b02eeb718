"""A run of one's own model on disk: weights as transformers loads them, states by DCP."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from memtrain.training import pretrained
from memtrain.training.checkpoint import FOLDERS, FORMAT, PROGRESS, STATES, write_folder
from memtrain.training.run import Run
from memtrain.training.text_rows import TextRows


def write_model(path: Path, run: Run) -> None:
    """Write a model's weights, and its tokenizer, for `from_pretrained`.

    Args:
        path: A folder that is not there yet.
        run: Its model; every process calls this.

    Raises:
        OSError: In every process, if it cannot be written; nothing is left behind.
    """
    weights = _weights(run)
    write_folder(path, lambda folder: _save(folder, run, weights), "model", run.processes)


def write_run(path: Path, run: Run, content: Mapping[str, Any]) -> None:
    """Write a run: its model as `write_model` does, its optimizer's states, how far it is.

    Args:
        path: A folder that is not there yet.
        run: Every process calls this.
        content: What else the checkpoint holds.

    Raises:
        OSError: In every process, if it cannot be written; nothing is left behind.

    Memory:
        The weights once more, in the first process, where they are sharded.
    """
    weights, alone = _weights(run), not dist.is_initialized()
    states = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}

    def fill(folder: Path) -> None:
        _save(folder, run, weights)
        if run.processes.first:
            whole = {**content, "current": run.progress(), "format": FORMAT}
            torch.save(whole, folder / PROGRESS)
        with _no_advice():
            dcp.save(states, checkpoint_id=folder / STATES, no_dist=alone)

    write_folder(path, fill, "checkpoint", run.processes)


def write_newest(parent: Path, step: int, run: Run, content: Mapping[str, Any]) -> None:
    """`write_run` into `checkpoint-<step>`, then let older checkpoints go.

    Args:
        parent: The output folder.
        step: Of all runs.
        run: As `write_run`.
        content: As `write_run`.

    Raises:
        OSError: As `write_run`; the older checkpoint stays.
    """
    path = parent / f"{FOLDERS}{step:08}"
    if run.processes.told(path.is_dir()):
        return  # stopped right behind a step that was saved
    write_run(path, run, content)
    for older in parent.glob(f"{FOLDERS}*") if run.processes.first else ():
        if older != path:
            shutil.rmtree(older, ignore_errors=True)


def load_run(run: Run, state: Mapping[str, Any]) -> None:
    """Continue a run; its weights were loaded when it was made.

    Args:
        run: Made with this checkpoint's weights.
        state: What `read_checkpoint` read.

    Raises:
        OSError: If its states are not this run's.
    """
    states = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}
    where, alone = Path(state["weights"]) / STATES, not dist.is_initialized()
    try:
        with _no_advice():
            dcp.load(states, checkpoint_id=where, no_dist=alone)
    except CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        raise OSError(
            f"the states of {str(where)!r} do not fit this run ({why}); allowed: the "
            "training.parallel that wrote them"
        ) from error
    set_optimizer_state_dict(run.model, run.optimizer, states["optimizer"])
    run.load_progress(state["current"])


@contextmanager
def _no_advice() -> Iterator[None]:
    """DCP warns in each single process that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _save(folder: Path, run: Run, weights: Mapping[str, Any]) -> None:
    if run.processes.first:
        tokenizer = run.source.tokenizer if isinstance(run.source, TextRows) else None
        pretrained.save(run.model, folder, weights, tokenizer)


def _weights(run: Run) -> Mapping[str, Any]:
    """Whole weights; where they are sharded, in the first process's memory only."""
    if run.config.training.parallel == "ddp":
        return run.model.state_dict()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(run.model, options=options)
