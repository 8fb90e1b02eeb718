"""`memtrain-train`: train plain, then wrapped, and show where every byte went."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

if TYPE_CHECKING:
    from memtrain.training.settings import TrainConfig

HELP = """\
usage: memtrain-train [key=value ...]

Train a small model plain, then wrapped by memtrain, from the same seed on the same batches, and
show bytes, step time and losses side by side; or train a model of your own. Results go to
outputs/<experiment>/<time>/.

examples:
  memtrain-train                                    a byte-level GPT on Python's own library
  memtrain-train experiment=digits                  a residual CNN on scikit-learn's digits
  memtrain-train preset=smallest training.steps=50  another preset, a shorter run
  memtrain-train training.runs=[wrapped]            one run only
  memtrain-train model.layers=6 optimizer.lr=1e-3   any key of the config
  memtrain-train budget=200MiB                      a plan whose peak fits, and whether it did
  memtrain-train model=hf:FOLDER data=text:FILE budget=16GiB
                                                    a model of transformers on a text, in 16 GiB
  memtrain-train model=hf:CONFIG model.weights=random data=jsonl:FILE data.prompt=question
                                                    from initial values; prompts are not learned
  torchrun --nproc-per-node 2 -m memtrain.cli.train model=hf:FOLDER data=text:FILE
                                                    in two processes (training.parallel=fsdp)
  memtrain-train compile=blocks                     each repeated block inside torch.compile
  memtrain-train resume=outputs/gpt_stdlib/<time>   continue to the last bit (Ctrl-C saved it)
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
    if {"-h", "--help"} & set(arguments):
        Console().out(_help(), end="", highlight=False)
        return 0
    # torch takes a second to import: help does not wait for it
    from memtrain.training.processes import joined

    with joined() as processes:
        make = partial(_session, processes)
        return run("memtrain-train", arguments, make, quiet=not processes.first)


def run(
    program: str,
    arguments: Sequence[str],
    make: Callable[[list[str], Console | None], tuple[Any, Any]],
    *,
    quiet: bool = False,
) -> int:
    """Run a program that trains: its mistakes and failures are one line and an exit status each.

    Args:
        program: Its name, before messages.
        arguments: `key=value` each; with `--config` the config is printed and nothing trained.
        make: Overrides and a console -> the config, and what has a `train()`: None without a
            console.
        quiet: Another process says the same.

    Returns:
        The exit status.
    """
    console = Console(quiet=quiet)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, quiet=quiet)
    shown = "--config" in arguments
    overrides = [item for item in arguments if item != "--config"]
    try:
        config, session = make(overrides, None if shown else console)
        if shown:
            console.out(OmegaConf.to_yaml(config), end="", highlight=False)
            return 0
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        errors.print(f"{program}: {error}", markup=False)
        return 2
    try:
        session.train()
    except KeyboardInterrupt as stop:  # a session saved what it had, and says where
        errors.print(f"{program}: {str(stop) or 'interrupted'}", markup=False)
        return 130
    except (OSError, FloatingPointError) as error:
        errors.print(f"{program}: {error}", markup=False)
        return 1
    return 0


def _session(processes: Any, overrides: list[str], console: Console | None) -> tuple[Any, Any]:
    from memtrain.training.session import Session
    from memtrain.training.settings import compose, from_mapping

    config, state = read_config(overrides, lambda given: from_mapping(compose(given)))
    session = console and Session(config, state=state, console=console, processes=processes)
    return config, session


def read_config(
    overrides: Sequence[str], compose: Callable[[Sequence[str]], "TrainConfig"]
) -> tuple["TrainConfig", dict[str, Any] | None]:
    """Read the config of a run: composed, or that of a checkpoint that is resumed.

    Args:
        overrides: `key=value` each; with `resume=` only `output.*` and `training.*`.
        compose: What makes a config of overrides.

    Returns:
        The config, and the content of the checkpoint where one is resumed.

    Raises:
        ValueError: For an unknown key or value, or one that cannot change a run that is resumed.
        TypeError: For a value of the wrong type.
        FileNotFoundError: If there is no such checkpoint.
    """
    from memtrain.training.checkpoint import read_checkpoint
    from memtrain.training.settings import from_mapping

    resume = [item.removeprefix("resume=") for item in overrides if item.startswith("resume=")]
    if not resume:
        return compose(overrides), None
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


if __name__ == "__main__":  # torchrun -m memtrain.cli.train
    sys.exit(main())
