"""`python -m experiments`: the papers' experiments, from a checkout of the repository."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import (
    derivatives,
    optimizer_states,
    paper_table,
    precision_transformers,
    states_ablation,
)
from experiments.study import Runs
from experiments.sweep import Sweep, SweepTrainConfig
from memtrain.cli.train import read_config, run
from memtrain.config.errors import nearest
from memtrain.config.sources import options
from memtrain.training.session import Session
from memtrain.training.settings import compose, from_mapping

CONFIGS = Path(__file__).parent / "configs"
"""Config groups that are found beside memtrain's own."""
STUDIES = {
    "derivatives": derivatives.STUDY,
    "optimizer_states": optimizer_states.STUDY,
    "precision_transformers": precision_transformers.STUDY,
    "states_ablation": states_ablation.STUDY,
}
"""Allowed values of `study.name`."""
HELP = """\
usage: python -m experiments NAME [key=value ...]
       python -m experiments key=value ...

Run an experiment of the papers; `key=value` alone trains as memtrain-train does, with the configs
of experiments/configs beside memtrain's own.

examples:
  python -m experiments precision_tradeoff   accuracy against the low-precision ratio: many short
                                             runs into one CSV; the same call goes on
  python -m experiments paper_table          the few-bit paper's table of activation memory
  python -m experiments optimizer_states     states of 32 to 2 bits, over seeds: likewise
  python -m experiments states_ablation      ways to hold the second moment in 4 bits: likewise
  python -m experiments derivatives          few-bit derivatives, to the end: likewise
  python -m experiments precision_transformers   precision assignments of a GPT and a ViT: likewise
  python -m experiments optim=ablation/b128_de training.steps=50
  python -m experiments precision_overflow --config   print the config, train nothing

names: {names}

exit status: 0 done, 1 failed, 2 wrong config, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment that the first argument names.

    Args:
        arguments: Without the program's name; `sys.argv`'s by default.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    names = [*options("experiment", [CONFIGS]), "paper_table"]
    if not arguments or {"-h", "--help"} & set(arguments):
        Console().out(HELP.format(names=", ".join(names)), end="", highlight=False)
        return 0
    name, *rest = arguments
    if "=" in name or name.startswith("-"):
        return run("experiments", arguments, _session)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    if name not in names or (name == "paper_table" and rest):
        wrong = f"unknown experiment {name!r}; {nearest(name, names)}"
        if name in names:
            wrong = f"paper_table takes no keys; {rest[0]!r} is not for it"
        errors.print(f"experiments: {wrong}", markup=False)
        return 2
    if name == "paper_table":
        paper_table.show(Console(), errors)
        return 0
    return run("experiments", [f"experiment={name}", *rest], _session)


def _session(overrides: list[str], console: Console | None) -> tuple[Any, Any]:
    config, state = read_config(
        overrides,
        lambda given: from_mapping(compose(given, SweepTrainConfig, [CONFIGS]), SweepTrainConfig),
    )
    if console is None:
        return config, None
    if isinstance(config, SweepTrainConfig) and config.study.name:
        if config.study.name not in STUDIES:
            raise ValueError(f"study.name: {nearest(config.study.name, list(STUDIES))}")
        return config, Runs(config.study, STUDIES[config.study.name], Path(config.output.folder))
    if isinstance(config, SweepTrainConfig) and config.sweep.families:
        return config, Sweep(config, console=console)
    return config, Session(config, state=state, console=console)


if __name__ == "__main__":
    sys.exit(main())
