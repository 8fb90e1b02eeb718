"""Lines told before a run's first step: model, data, what it will take, whether it fits."""

from pathlib import Path

import torch

from memtrain.audit.live_storages import storage_nbytes
from memtrain.config.sizes import format_size
from memtrain.training.rows import Rows
from memtrain.training.run import Run
from memtrain.training.text_rows import TextRows


def described(run: Run) -> list[str]:
    """Lines about the model and the data.

    Args:
        run: Before its first step.
    """
    parameters = list(run.model.parameters())
    whole = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    lines = [f"model: {whole:,} parameters" + (f", {trained:,} trained" * (trained < whole))]
    fresh = getattr(run.model, "fresh", ())
    if fresh:
        shown = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
        lines.append(f"model: not in its folder, so with initial values: {shown}")
    if run.slow_products:
        lines.append("cpu: bfloat16 products are made in float32, which is faster here")
    source = run.source
    if isinstance(source, Rows):
        counts = [f"{len(source.parts[split]):,}" for split in ("train", "validation")]
        told = f"data: {counts[0]} rows to train on, {counts[1]} held out"
        if isinstance(source, TextRows):
            told += f"; {len(source.corpus.tokens):,} tokens, the longest row has {source.length}"
        lines.append(told)
        if isinstance(source, TextRows) and source.cut:
            lines.append(
                f"data: {source.cut:,} documents are longer than a row: their ends are cut"
            )
    return lines


def foretold(run: Run) -> list[str]:
    """Lines about the peak of a step on the longest batch, and what to change if it does not fit.

    Args:
        run: Before its first step, made with `foretell`.
    """
    peak = run.forecast
    if run.fit is not None:
        more = 0 if peak is None else peak.nbytes - run.fit.peak.nbytes
        held = f"besides, gradients of earlier microbatches take at most {format_size(more)}"
        return [*run.fit.lines(), *([held] if more else [])]
    if peak is None:
        return [f"peak of a step: not predicted ({run.unpredictable})"] if run.unpredictable else []
    parts = sorted(peak.parts.items(), key=lambda pair: -pair[1])
    held = ", ".join(f"{name} {format_size(n)}" for name, n in parts if n > peak.nbytes / 100)
    lines = [
        f"peak of a step: {format_size(peak.nbytes)} predicted for the longest batch of "
        f"{run.micro} rows, in the {peak.label} ({held})"
    ]
    room = memory_left(run.device, storage_nbytes(run.model.parameters()))
    if room is not None and peak.nbytes > room:
        lines.append(f"that does not fit: {format_size(room)} are left on {run.device.type}")
        lines.append(f"what would help: budget={format_size(room).replace(' ', '')} plans for it")
    return lines


def memory_left(device: torch.device, held: int = 0) -> int | None:
    """Bytes that a run may take on a device.

    Args:
        device: Where it trains.
        held: What it has taken already.

    Returns:
        Bytes; None where the system does not tell them.

    Example:
        >>> memory_left(torch.device("cpu")) != 0
        True
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) + held if found else None
