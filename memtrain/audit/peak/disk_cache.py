"""Predicted timelines on disk, for a model, an optimizer and a batch that a few words tell."""

import gzip
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memtrain.audit.peak.timeline import Moment, Timeline
from memtrain.plan.file import load
from memtrain.plan.plan import Plan

ENTRIES = 512
"""So many files are kept, the newest."""
_SUFFIX = ".timeline.json.gz"
_LIBRARIES = (
    "ATEN_",
    "CUBLAS_",
    "DNNL_",
    "MEMTRAIN_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "PYTORCH_",
    "TORCH_",
)


def cache_folder() -> Path | None:
    """The folder of what can be made again: `$MEMTRAIN_CACHE`, or by the XDG convention.

    Returns:
        `$XDG_CACHE_HOME/memtrain`, by default `~/.cache/memtrain`; None where `MEMTRAIN_CACHE` is
        set and empty.
    """
    own = os.environ.get("MEMTRAIN_CACHE")
    if own is not None:
        return Path(own).expanduser() if own else None
    base = os.environ.get("XDG_CACHE_HOME", "")  # the convention: relative paths do not count
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "memtrain"


@dataclass(frozen=True)
class DiskCache:
    """Timelines by config and batch, of one model and one optimizer.

    Files that are corrupt, or of something else, are ignored with a warning and replaced.
    """

    folder: Path
    """Made where it is missing."""
    subject: str
    """The model, its optimizer and the step, in words that tell them from all others."""
    warn: Callable[[str], object] = warnings.warn

    def timeline(
        self, cfg: Any, batch: Any, make: Callable[[], Timeline], step: Any = None
    ) -> Timeline:
        """Read a timeline, or make and write it.

        Args:
            cfg: Anything that `memtrain.wrap` takes; None for plain PyTorch.
            batch: Its tensors' shapes and dtypes count.
            make: Predicts it.
            step: The options of the step.

        Returns:
            What `make` returned, now or in an earlier process of the same versions.
        """
        key = self._key(cfg, batch, step)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{_SUFFIX}"
        found = self._read(path, key)
        if found is None:
            found = make()
            self._write(path, key, found)
        return found

    def _key(self, cfg: Any, batch: Any, step: Any) -> str:
        tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
        config = cfg.config if isinstance(cfg, Plan) else cfg
        told = {
            "subject": self.subject,
            "step": repr(step),
            "batch": [[*x.shape, str(x.dtype)] for x in tensors],
            "config": None if config is None else asdict(load(config)),
            "computed_by": _computed_by(),
        }
        return json.dumps(told, default=repr)

    def _read(self, path: Path, key: str) -> Timeline | None:
        try:
            content = json.loads(gzip.decompress(path.read_bytes()))
            if content["key"] != key:
                raise ValueError("it is of another model, config or version")
            moments = tuple(Moment(*moment) for moment in content["moments"])
            return Timeline(moments, reserved=content["reserved"])
        except FileNotFoundError:
            return None
        # gzip, JSON and the content each have errors of their own; all mean the same here.
        except Exception as error:  # noqa: BLE001
            self.warn(f"the cache file {str(path)!r} is ignored ({error}), and made anew")
            return None

    def _write(self, path: Path, key: str, timeline: Timeline) -> None:
        moments = [(m.label, m.phase, m.nbytes, m.parts) for m in timeline.moments]
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"key": key, "moments": moments, "reserved": timeline.reserved})
            partial.write_bytes(gzip.compress(content.encode(), 5))
            partial.replace(path)
            entries = [*self.folder.glob(f"*{_SUFFIX}")]
            for old in sorted(entries, key=lambda one: one.stat().st_mtime)[:-ENTRIES]:
                old.unlink()
        except OSError as error:
            self.warn(f"predictions are not cached: {error}")
            with suppress(OSError):
                partial.unlink()


def _computed_by() -> list[str]:
    """All that a prediction is computed by, besides the model, the batch and the config.

    Returns:
        Digests and versions of code; the CPU's kernels and threads; the environment variables of
        torch and its libraries; hooks that someone has put on every module.
    """
    hooks = vars(nn.modules.module)
    everywhere = [name for name, value in hooks.items() if "_global_" in name and value]
    named = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_LIBRARIES))
    kernels = torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())
    return [*_code(), *kernels, *named, *everywhere]


@cache
def _code() -> tuple[str, ...]:
    """A digest of memtrain's files, and the versions of what runs beside it."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    packages = ("torch", "transformers", "numpy")
    return digest.hexdigest(), torch.__version__, sys.version, *map(_version, packages)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} -"
