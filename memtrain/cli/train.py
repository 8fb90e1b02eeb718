"""`memtrain-train`: train plain, then wrapped, and show where every byte went."""

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

if TYPE_CHECKING:
    from memtrain.experiments.config import TrainConfig

HELP = """\
usage: memtrain-train [key=value ...]

Train a model plain, then wrapped by memtrain, from the same seed on the same batches, and show
bytes, step time and losses side by side. Results go to outputs/<experiment>/<time>/.

examples:
  memtrain-train                                    a byte-level GPT on Python's own library
  memtrain-train experiment=digits                  a residual CNN on scikit-learn's digits
  memtrain-train preset=smallest training.steps=50  another preset, a shorter run
  memtrain-train training.runs=[wrapped]            one run only
  memtrain-train model.layers=6 optimizer.lr=1e-3   any key of the config
  memtrain-train budget=200MiB                      a plan whose peak fits, and whether it did
  memtrain-train resume=outputs/gpt_stdlib/<time>   continue to the last bit (Ctrl-C saved it)
  memtrain-train experiment=precision_tradeoff      many short runs into one CSV; goes on where it
                                                    stopped
  memtrain-train --config [key=value ...]           print the config, train nothing

groups: {groups}

Keys and their defaults: --config. After resume= only output.* and training.* may change.
exit status: 0 done, 1 failed, 2 wrong config, 130 interrupted (a checkpoint was saved)
"""
_GROUPS = ("experiment", "preset", "activations", "optim", "model", "data")
_CHANGEABLE = ("output.", "training.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        arguments: Without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status.

    Example:
        >>> main(["experiment=digit", "output.quiet=true"])
        2
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console, errors = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    if {"-h", "--help"} & set(arguments):
        console.out(_help(), end="", highlight=False)
        return 0
    # torch takes a second to import: help does not wait for it
    from memtrain.experiments.session import Interrupted, Session
    from memtrain.experiments.sweep.sweep import Sweep

    try:
        config, state = _config([item for item in arguments if item != "--config"])
        if "--config" in arguments:
            console.out(OmegaConf.to_yaml(config), end="", highlight=False)
            return 0
        if config.sweep.families:
            session = Sweep(config, console=console)
        else:
            session = Session(config, state=state, console=console)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        errors.print(f"memtrain-train: {error}", markup=False)
        return 2
    try:
        session.train()
    except Interrupted as stop:
        errors.print(f"memtrain-train: {stop}", markup=False)
        return 130
    except KeyboardInterrupt:  # a session asks for it and saves; what a sweep has is saved already
        errors.print("memtrain-train: interrupted; the same call goes on", markup=False)
        return 130
    except (OSError, FloatingPointError) as error:
        errors.print(f"memtrain-train: {error}", markup=False)
        return 1
    return 0


def _config(overrides: list[str]) -> tuple["TrainConfig", dict[str, Any] | None]:
    from memtrain.experiments.checkpoint import read_checkpoint
    from memtrain.experiments.config import compose, from_mapping

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
    merged = OmegaConf.merge(DictConfig(state["config"]), changes)
    return from_mapping(DictConfig(merged)), state


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
