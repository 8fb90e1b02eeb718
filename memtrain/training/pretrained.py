"""Models of one's own: transformers' from a folder or a config, and a user's function."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memtrain.config.transformers_configs import (
    config_file,
    import_transformers,
    prepare_for_training,
    read_config,
    tasks_of,
)
from memtrain.config.user_functions import user_function
from memtrain.training.settings import in_range, one_of

TASKS = ("CausalLM", "MaskedLM", "ImageClassification")
"""Tasks of transformers' `AutoModelFor` classes that there are data for."""
DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}
WEIGHTS = ("folder", "random")
FILE = "model.safetensors"
SHARD = "500MB"
"""Of a file of weights, at most."""
_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "spiece*")


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A transformers model on disk; nothing but its config is read before `build`.

    Raises:
        ValueError: For a value that is not allowed, or a config that no task here has.
        FileNotFoundError: If there is no config, or no weights and none at random are asked for.
        ModuleNotFoundError: If transformers, or peft for LoRA, is not installed.
    """

    path: str
    """A folder as `save_pretrained` writes it, or a config.json."""
    task: str | None = None
    """One of `TASKS`; by default the one that the config's `architectures` name."""
    weights: str = "folder"
    """`folder`, or `random`: initial values, by the seed."""
    dtype: str = "float32"
    """Of the weights: a name of `DTYPES`."""
    attention: str | None = None
    """`eager` or `sdpa`; transformers' choice by default."""
    dropout: float | None = None
    """Every dropout of the config; as the config says by default."""
    classes: int | None = None
    """Of an image classifier, where they are not those that it has been trained for."""
    lora: int = 0
    """Rank of LoRA's matrices, by peft; 0 trains the model itself."""
    lora_alpha: float = 16.0
    """LoRA's alpha."""
    lora_targets: str = "all-linear"
    """Modules that get LoRA matrices: `all-linear`, or names with commas between."""

    def __post_init__(self) -> None:
        one_of("model.weights", self.weights, WEIGHTS)
        one_of("model.dtype", self.dtype, tuple(DTYPES))
        in_range("model.lora", self.lora, at_least=0)
        if self.task is not None:
            one_of("model.task", self.task, TASKS)
        if self.attention is not None:
            one_of("model.attention", self.attention, ("eager", "sdpa"))
        if self.dropout is not None:
            in_range("model.dropout", self.dropout, at_least=0, below=1)
        if self.lora:
            _peft()

    @property
    def file(self) -> Path:
        """The config's file."""
        return config_file(self.path)

    @cached_property
    def config(self) -> Any:
        """Transformers' config, with the dropout that is asked for and without a cache."""
        config = read_config(self.path)
        if self.weights == "folder" and not _holds_weights(Path(self.path).expanduser()):
            raise FileNotFoundError(
                f"model=hf:{self.path} has no weights (*.safetensors); "
                "model.weights=random trains its config from initial values"
            )
        prepare_for_training(config, self.dropout)
        if self.classes is not None:
            config.num_labels = self.classes
        return config

    @cached_property
    def trained_task(self) -> str:
        """The task, asked for or named by the config."""
        known, named = tasks_of(self.config, TASKS)
        if self.task is not None and self.task not in known:
            kind = type(self.config).__name__
            raise ValueError(f"model.task={self.task!r}: {kind} has {', '.join(known) or 'none'}")
        if self.task is None and not named:
            written = " ".join(self.config.architectures or ()) or "no architecture"
            kind = f"{type(self.config).__name__} of {written}"
            raise ValueError(
                f"model=hf:{self.path}: {kind} does not tell its task; "
                f"allowed: model.task={'|'.join(known) or ', with another model'}"
            )
        return self.task or named[0]

    @property
    def longest(self) -> int | None:
        """Most tokens that its positions take."""
        return getattr(self.config, "max_position_embeddings", None)

    def tokenizer(self, where: str | None = None) -> Any:
        """A tokenizer, by default the one beside the model, checked against its vocabulary.

        Args:
            where: Another folder.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it cannot be read, or has tokens that the model has not.
        """
        folder = Path(where or self.file.parent).expanduser()
        allowed = "allowed: data.tokenizer=<a folder with one>, or data.tokenizer=bytes"
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
            raise FileNotFoundError(f"{str(folder)!r} has no tokenizer; {allowed}")
        try:
            found = import_transformers("model=hf:").AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
        except Exception as error:  # transformers raises half a dozen types where files are missing
            told = f"the tokenizer of {str(folder)!r} cannot be read ({_first(error)}); {allowed}"
            raise ValueError(told) from error
        size = self.config.vocab_size
        if len(found) > size:
            raise ValueError(
                f"the tokenizer of {str(folder)!r} has {len(found):,} tokens, the model "
                f"{str(self.path)!r} {size:,}: they do not belong together; data.tokenizer= names "
                "another folder"
            )
        return found

    def build(self, folder: Path | None = None) -> nn.Module:
        """Make the model, its weights from the folder or at random, with LoRA where asked for.

        Parameters that the folder lacks (a head for a task that it was not trained for) have
        initial values; the model's attribute `fresh` names them.

        Args:
            folder: One that `save` wrote, in place of the model's own.

        Raises:
            ValueError: If the weights cannot be read, or are another model's.
        """
        auto = getattr(import_transformers("model=hf:"), f"AutoModelFor{self.trained_task}")
        options: dict[str, Any] = {"dtype": DTYPES[self.dtype]}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        fresh: Sequence[str] = ()
        base = self.file.parent if folder is None or self.lora else folder
        if self.weights == "random" and base != folder:
            model = auto.from_config(self.config, **options)
        else:
            model, fresh = self._loaded(auto, base, options)
        if self.lora:
            model = self._adapted(model, folder)
        model.fresh = tuple(fresh)
        return model

    def _loaded(
        self, auto: Any, folder: Path, options: dict[str, Any]
    ) -> tuple[Any, Sequence[str]]:
        try:
            model, told = auto.from_pretrained(
                str(folder),
                config=self.config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=self.classes is not None,
                **options,
            )
        except Exception as error:  # a damaged file raises what its reader raises
            raise ValueError(f"model=hf:{folder} cannot be read: {_first(error)}") from error
        missing = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
        if len(missing) == len(model.state_dict()):
            raise ValueError(f"model=hf:{folder}: its weights have none of the model's names")
        return model, sorted(missing)

    def _adapted(self, model: Any, folder: Path | None) -> Any:
        peft = _peft()
        if folder is not None:
            return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        names = self.lora_targets.split(",")
        config = peft.LoraConfig(
            r=self.lora,
            lora_alpha=self.lora_alpha,
            target_modules=names[0] if names == ["all-linear"] else names,
            task_type="CAUSAL_LM" if self.trained_task == "CausalLM" else None,
        )
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"model.lora_targets={self.lora_targets!r}: {_first(error)}"
            ) from error


def save(model: nn.Module, folder: Path, weights: Mapping[str, Any], tokenizer: Any = None) -> None:
    """Write a model as its own library reads it: `save_pretrained`, or `model.safetensors`.

    Args:
        model: Of transformers, of peft (its adapter is written), or another.
        folder: An empty one.
        weights: Its `state_dict`.
        tokenizer: Written beside it.

    Raises:
        OSError: If the disk is full.
    """
    if hasattr(model, "save_pretrained"):
        written: Any = model
        # safetensors copies a whole file's tensors before it writes the first of them
        written.save_pretrained(str(folder), state_dict=dict(weights), max_shard_size=SHARD)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        return
    from safetensors.torch import save_file

    seen: dict[int, str] = {}  # tied weights are written once
    own = {k: x for k, x in weights.items() if seen.setdefault(x.data_ptr(), k) == k}
    save_file({key: x.contiguous() for key, x in own.items()}, str(folder / FILE))


def load(model: nn.Module, folder: Path) -> None:
    """Load what `save` wrote of a model that has no `from_pretrained`."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(str(folder / FILE)), strict=False)


def py(*, path: str) -> nn.Module:
    """Call a user's function for a model.

    Args:
        path: `package.module:function`; it takes no argument, and returns a model that is called
            with a batch's tensors by name (`input_ids`, `labels` ...) and returns its loss, or an
            output that has one.

    Raises:
        ValueError: If there is no such function, or it raises.
        TypeError: If it returns something else.
    """
    model = user_function(path)()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model='py:{path}' returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def _holds_weights(path: Path) -> bool:
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in _FILES)


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "model.lora needs peft: pip install 'memtrain[integrations]'"
        ) from error


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
