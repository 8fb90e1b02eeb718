"""`memtrain-train`: train without and with memtrain, and print where every byte went."""

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

if TYPE_CHECKING:
    from memtrain.training.settings import TrainConfig

HELP = """\
usage: memtrain-train [key=value ...]

Train a small model without and with memtrain, from the same seed on the same batches, and print
bytes, step time and losses side by side; or train your own model. Results go to
outputs/<experiment>/<time>/.

examples:
  memtrain-train                                    a byte-level GPT on sources of Python
  memtrain-train preset=smallest training.steps=50  another preset, a shorter run
  memtrain-train training.runs=[wrapped]            one run only
  memtrain-train model.layers=6 optimizer.lr=1e-3   any key of the config
  memtrain-train budget=200MiB                      a plan whose peak fits
  memtrain-train model=hf:FOLDER data=text:FILE budget=16GiB
                                                    a transformers model on a text, in 16 GiB
  memtrain-train model=hf:CONFIG model.weights=random data=text:FILE data.tokenizer=bytes
                                                    from initial values
  memtrain-train model=py:MODULE:FUNCTION data=py:MODULE:FUNCTION
                                                    the model and the dataset of two functions
  memtrain-train compile=blocks                     each repeated block inside torch.compile
  memtrain-train resume=outputs/gpt_stdlib/<time>   continue bit for bit (Ctrl-C saved it)
  memtrain-train --config [key=value ...]           print the config, train nothing

groups: {groups}

Keys and their defaults: --config. After resume= only output.* and training.* may change.
exit status: 0 done, 1 failed, 2 wrong config, 130 interrupted (a checkpoint was saved)
"""
_GROUPS = ("experiment", "preset", "activations", "optim", "model", "data")
_CHANGEABLE = ("output.", "training.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, by default with the arguments of `sys.argv`, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = Console()
    if {"-h", "--help"} & set(arguments):
        console.out(_help(), end="", highlight=False)
        return 0
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "one process trains; for several, see examples/accelerate_ddp.py and "
                "examples/accelerate_fsdp.py"
            )
        config, state = read_config([item for item in arguments if item != "--config"])
        if "--config" in arguments:
            console.out(OmegaConf.to_yaml(config), end="", highlight=False)
            return 0
        from memtrain.training.session import Session

        session = Session(config, state=state, console=console)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        errors.print(f"memtrain-train: {error}", markup=False)
        return 2
    try:
        session.train()
    except KeyboardInterrupt as stop:  # the session saved a checkpoint, and its message says where
        errors.print(f"memtrain-train: {str(stop) or 'interrupted'}", markup=False)
        return 130
    except (OSError, ValueError, FloatingPointError) as error:
        errors.print(f"memtrain-train: {error}", markup=False)
        return 1
    return 0


def read_config(overrides: Sequence[str]) -> tuple["TrainConfig", dict[str, Any] | None]:
    """Read the config of a run: composed, or that of a resumed checkpoint."""
    # torch takes a second to import: help does not wait for it
    from memtrain.training.checkpoint import read_checkpoint
    from memtrain.training.settings import compose, from_mapping

    resume = [item.removeprefix("resume=") for item in overrides if item.startswith("resume=")]
    if not resume:
        return from_mapping(compose(overrides)), None
    others = [item for item in overrides if not item.startswith("resume=")]
    wrong = [item for item in others if not item.startswith(_CHANGEABLE)]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} cannot change a run that is resumed; allowed: output.*, training.*"
        )
    state = read_checkpoint(resume[-1])
    changes = OmegaConf.from_dotlist([*others, f"resume={resume[-1]}"])
    return from_mapping(DictConfig(OmegaConf.merge(DictConfig(state["config"]), changes))), state


def _help() -> str:
    from memtrain.config.sources import options

    lines = [
        line
        for group in _GROUPS
        for line in textwrap.wrap(
            f"{group}: {', '.join(options(group))}", 90, subsequent_indent="  "
        )
    ]
    return HELP.format(groups=("\n" + " " * 8).join(lines))
