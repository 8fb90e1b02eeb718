"""The user's models: transformers' from a folder or a config, and a user-defined function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memtrain.config.errors import in_range
from memtrain.config.transformers_configs import (
    config_file,
    import_transformers,
    prepare_for_training,
    read_config,
    tasks_of,
)
from memtrain.config.user_functions import user_function
from memtrain.training.settings import one_of

DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}
WEIGHTS = ("folder", "random")
SHARD = "500MB"
"""Largest size of one file of weights."""
_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model", "spiece*")


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A causal language model of transformers on disk; only its config is read before `build`."""

    path: str
    """A folder as `save_pretrained` writes it, or a config.json."""
    weights: str = "folder"
    """`folder`, or `random`: initial values, by the seed."""
    dtype: str = "float32"
    """Dtype of the weights: a key of `DTYPES`."""
    dropout: float | None = None
    """Every dropout of the config; None leaves the config's."""

    def __post_init__(self) -> None:
        one_of("model.weights", self.weights, WEIGHTS)
        one_of("model.dtype", self.dtype, tuple(DTYPES))
        if self.dropout is not None:
            in_range("model.dropout", self.dropout, at_least=0, below=1)

    @property
    def folder(self) -> Path:
        """The folder of the config's file."""
        return config_file(self.path).parent

    @cached_property
    def config(self) -> Any:
        """Transformers' config, with the requested dropout and without a cache."""
        config = read_config(self.path)
        # AutoModelForCausalLM also takes encoders, whose attention sees the tokens to predict.
        if not tasks_of(config, ("CausalLM",))[1]:
            named = " ".join(config.architectures or ()) or "no architecture"
            raise ValueError(
                f"model=hf:{self.path}: {type(config).__name__} of {named} is not a causal "
                "language model; allowed: a config whose `architectures` names one, or "
                "model=py:<module>:<function> with data=py:<module>:<function>"
            )
        if self.weights == "folder" and not _has_weights(Path(self.path).expanduser()):
            raise FileNotFoundError(
                f"model=hf:{self.path} has no weights (*.safetensors); "
                "model.weights=random trains its config from initial values"
            )
        prepare_for_training(config, self.dropout)
        return config

    @property
    def longest(self) -> int | None:
        """The longest sequence that the positions allow, in tokens."""
        return getattr(self.config, "max_position_embeddings", None)

    def tokenizer(self, where: str | None = None) -> Any:
        """Load a tokenizer, by default the one beside the model, and check its vocabulary."""
        folder = Path(where or self.folder).expanduser()
        allowed = "allowed: data.tokenizer=<a folder with one>, or data.tokenizer=bytes"
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
            raise FileNotFoundError(f"{str(folder)!r} has no tokenizer; {allowed}")
        try:
            found = import_transformers("model=hf:").AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True
            )
        except Exception as error:  # transformers raises half a dozen types where files are missing
            raise ValueError(
                f"the tokenizer of {str(folder)!r} cannot be read ({_first(error)}); {allowed}"
            ) from error
        size = self.config.vocab_size
        if len(found) > size:
            raise ValueError(
                f"the tokenizer of {str(folder)!r} has {len(found):,} tokens, the model "
                f"{str(self.path)!r} {size:,}: they do not belong together; data.tokenizer= names "
                "another folder"
            )
        return found

    def build(self) -> nn.Module:
        """Make the model, with weights from the folder or random ones.

        Parameters that the folder lacks have initial values; the model's attribute `fresh` lists
        their names.
        """
        auto = import_transformers("model=hf:").AutoModelForCausalLM
        options: dict[str, Any] = {"dtype": DTYPES[self.dtype]}
        fresh: Sequence[str] = ()
        if self.weights == "random":
            model = auto.from_config(self.config, **options)
        else:
            model, fresh = self._loaded(auto, options)
        model.fresh = tuple(fresh)
        return model

    def _loaded(self, auto: Any, options: dict[str, Any]) -> tuple[Any, Sequence[str]]:
        try:
            model, info = auto.from_pretrained(
                str(self.folder),
                config=self.config,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
        except Exception as error:  # a damaged file raises what its reader raises
            raise ValueError(f"model=hf:{self.folder} cannot be read: {_first(error)}") from error
        missing = set(info["missing_keys"])
        if len(missing) == len(model.state_dict()):
            raise ValueError(f"model=hf:{self.folder}: its weights have none of the model's names")
        return model, sorted(missing)


def save(model: nn.Module, folder: Path, weights: Mapping[str, Any], tokenizer: Any = None) -> None:
    """Write a model as its library reads it: by `save_pretrained`, else a state dict `model.pt`."""
    if hasattr(model, "save_pretrained"):
        pretrained: Any = model
        # safetensors copies the tensors of a whole file before it writes the first of them
        pretrained.save_pretrained(str(folder), state_dict=dict(weights), max_shard_size=SHARD)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        return
    torch.save(dict(weights), folder / "model.pt")


def py(*, path: str) -> nn.Module:
    """Call a user-defined function for a model."""
    model = user_function(path)()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model='py:{path}' returned a {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(any(path.glob(pattern)) for pattern in _FILES)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
