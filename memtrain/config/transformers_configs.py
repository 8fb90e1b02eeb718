"""Configs of transformers models on disk."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DROPOUTS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "drop_path_rate")


def import_transformers(key: str) -> Any:
    """Import transformers without its warnings and progress bars."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{key} needs transformers: pip install 'memtrain[models]'"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def config_file(path: str | Path) -> Path:
    """Return the file of a config from the file's or its folder's path."""
    folder = Path(path).expanduser()
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise FileNotFoundError(f"model=hf:{path}: {str(file)!r} does not exist")
    return file


def read_config(path: str | Path) -> Any:
    """Load a config that `save_pretrained` wrote, without any download."""
    file, transformers = config_file(path), import_transformers("model=hf:")
    try:
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model=hf:{path}: {str(error).splitlines()[0]}") from error


def tasks_of(config: Any, tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a config's possible tasks (suffixes of `AutoModelFor`), and its `architectures`'."""
    transformers = import_transformers("model=hf:")
    known = [
        task
        for task in tasks
        if type(config) in getattr(transformers, f"AutoModelFor{task}")._model_mapping
    ]
    suffixes = {"LMHeadModel": "CausalLM", "ForConditionalGeneration": "Seq2SeqLM"}
    suffixes |= {f"For{task}": task for task in tasks}
    named = " ".join(config.architectures or ())
    return known, [task for suffix, task in suffixes.items() if suffix in named and task in known]


def prepare_for_training(config: Any, dropout: float | None) -> None:
    """Disable the cache of generation in a config, and set every dropout unless it is None."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if dropout is not None:
        for name in [name for name in vars(config) if name.endswith(_DROPOUTS)]:
            setattr(config, name, float(dropout))
