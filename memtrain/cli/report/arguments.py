"""The command line of `memtrain-report`: its help, its options, and its keys."""

import argparse
import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memtrain.cli.command_line import check_writable
from memtrain.cli.models.build_model import known_models
from memtrain.cli.models.named_models import NAMED_MODELS
from memtrain.cli.models.request import OPTIMIZERS, Request
from memtrain.cli.render.charts import require_matplotlib
from memtrain.cli.render.report_data import GROUPINGS
from memtrain.config.sizes import UNITS, parse_size
from memtrain.config.sources import Config, load, nearest, options
from memtrain.training.settings import typed

FILES = ("json", "svg")
"""Options that write a file."""
PLANNER = ("allow", "max_error", "objective")
"""Keys that need `budget=`."""
STDOUT = Path("-")
HELP = """\
usage: memtrain-report model=NAME [key=value ...] [options]

Predict the bytes of a training step without running it: weights, gradients,
optimizer states and saved activations, without memtrain and with a plan. No
weight is allocated.

examples:
  memtrain-report model=gpt2 preset=balanced batch=8 seq=1024
  memtrain-report model=resnet50 batch=32 image=224 optimizer=sgd --by op
  memtrain-report model=gpt2 preset=smallest activations.min_elements=2048
  memtrain-report model=py:my_package.module:build   (a model and its batch)
  memtrain-report model=hf:path/to/config.json
  memtrain-report model=gpt2 memory=24GiB            (the largest batch)
  memtrain-report model=gpt2 batch=8 budget=4GiB --plan plan.yaml
  memtrain-report model=gpt2 batch=8 plan=plan.yaml
  memtrain-report model=resnet18 batch=4 device=cpu --measure
  memtrain-report model=gpt2 --json - | jq .categories

models: {models}

keys:
  model, batch, seq (text), image (its height and width)
  dtype      float32, bfloat16, float16 (or fp32, bf16, fp16)
  labels     true: the loss's saved tensors count; false: they do not
  attention  eager, sdpa
  dropout    0 turns every dropout of a transformers config off
  optimizer  {optimizers}
  compile    true: inside torch.compile; blocks: each repeated block by itself
             (device=cpu, which is then the default)
  device     cuda, cuda:sm_90 or cpu: whose kernels and allocator the peak is of
  autocast   bfloat16, float16: around the forward whose peak is predicted
  context    512MiB: what the CUDA context takes of the device in memory= and
             budget=
  memory     24GiB, 24GB ...: search the largest batch and the longest sequence
             whose predicted peak fits (minutes)
  budget     24GiB, 24GB ...: find a plan whose peak fits (about a minute); the
             plan replaces the preset's rules; with
    allow      quantise,recompute (also: release, weights)
    max_error  1: the most noise, in units of balanced's
    objective  time, error
  plan       a plan file in place of the keys below
  verify     true: build the model, run one batch, and compare replaced ops,
             saved tensors and each site's gradient with the exact ones (needs
             a training step's memory, and some passes per site)
  preset     {presets}
  and any key of memtrain's config

options:
  --by WHAT    sum the largest rows by pattern (h.*.mlp; the default), site,
               module or op
  --top N      how many of them to show (10)
  --json FILE  write the report as JSON (docs/guides/report.md describes it); -
               is the standard output, and then no table is printed
  --svg FILE   draw the live bytes over the step, without and with the plan
               (needs matplotlib)
  --plan FILE  write the plan, for plan= and wrap(model, optimizer, FILE)
  --measure    allocate the model, run steps without and with the plan, and
               print their peaks (needs a step's memory)
  --no-peak    leave out the peak: faster, as no backward and no update is
               simulated
  --fail-over SIZE    exit status 3 if the planned peak (with --no-peak: the
               planned total) is above SIZE: 24GiB is 24 * 2**30 bytes, 24GB
               is 24 * 10**9

exit status: 0 done, 1 the model could not be traced, 2 wrong arguments or a
file that cannot be read or written, 3 --fail-over, or nothing fits the budget,
or verify=true finds wrong values or a biased gradient, 130 interrupted
"""


def help_text() -> str:
    """Return the help with the names of models, optimizers and presets."""

    def wrapped(names: Iterable[str], indent: int) -> str:
        lines = textwrap.wrap(", ".join(names), 80 - indent, break_on_hyphens=False)
        return ("\n" + " " * indent).join(lines)

    return HELP.format(
        models=wrapped(NAMED_MODELS, 8),
        optimizers=wrapped(OPTIMIZERS, 13),
        presets=wrapped(options("preset"), 13),
    )


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options; arguments of the form key=value are in `overrides`."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; see memtrain-report --help")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # argparse would print its usage and exit
    parser.add_argument("overrides", nargs="*")
    for name in FILES:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument("--by", choices=GROUPINGS, default=GROUPINGS[0])
    parser.add_argument("--no-peak", dest="peak", action="store_false")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--fail-over")
    options = parser.parse_intermixed_args(argv)
    if options.top < 1:
        raise ValueError(f"--top {options.top} is out of range; allowed: 1 or more")
    if options.fail_over is not None:
        options.fail_over = parse_size(options.fail_over, "--fail-over")
    if options.svg is not None:
        require_matplotlib("--svg")
    for name in (*FILES, "plan"):
        path = getattr(options, name)
        if path is not None and (name != "json" or path != STDOUT):
            check_writable(path, f"--{name}")
    return options


def parse_keys(overrides: Sequence[str]) -> tuple[Request, Config]:
    """Parse the keys of the report, and those of memtrain's config."""
    names = {item.name for item in dataclasses.fields(Request)}
    known = names | {item.name for item in dataclasses.fields(Config)} | {"preset"}
    for item in overrides:
        key, sign, _ = item.lstrip("+~").partition("=")
        if not sign:
            raise ValueError(_suggest_key(key))
        if key.split(".")[0] not in known:
            raise ValueError(f"unknown key {key!r}; {nearest(key, sorted(known))}")
    requested = [item for item in overrides if item.partition("=")[0].split(".")[0] in names]
    request = typed(Request, OmegaConf.from_dotlist(requested), "")  # type: ignore[arg-type]
    if not request.model:
        raise ValueError(f"model= is missing; allowed: {', '.join(known_models())}")
    keys = {item.partition("=")[0] for item in requested}
    if request.budget is None and (lone := [name for name in PLANNER if name in keys]):
        raise ValueError(f"{lone[0]}= is for the planner; allowed: together with budget=")
    rest = [item for item in overrides if item not in requested]
    if request.plan is not None and rest:
        raise ValueError(f"plan= with {rest[0]!r}; allowed: plan= or keys of a config, not both")
    return request, load(rest)


def _suggest_key(word: str) -> str:
    """Suggest keys for a word without one: a model, a preset, the unit of a size."""
    if word in UNITS:
        return f"no key=value: {word!r}; a size is one word: budget=8{word}"
    kinds = {"preset": options("preset"), "model": known_models()}
    meant = next((f"; did you mean {k}={word}?" for k, names in kinds.items() if word in names), "")
    return f"no key=value: {word!r}{meant or '; such as model=gpt2 batch=8'}"


def settings(request: Request, overrides: Sequence[str], batch: Any) -> dict[str, Any]:
    """Return the settings of a report by key, for its first line and its JSON file.

    The sizes of the batch complete the request's. Keys without a value are left out.
    """
    values = dataclasses.asdict(request)
    names = tuple(values)
    if isinstance(batch, dict):
        for name, tensor in (("seq", "input_ids"), ("image", "pixel_values")):
            values[name] = batch[tensor].shape[-1] if tensor in batch else values[name]
    first = next((x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), None)
    if request.model.startswith("py:") and first is not None:
        values["batch"] = len(first)
    if request.budget is None:
        values = {name: value for name, value in values.items() if name not in PLANNER}
    if request.budget is None and request.memory is None:
        del values["context"]
    values = {name: value for name, value in values.items() if value is not None}
    rest = [item for item in overrides if item.partition("=")[0] not in names]
    preset = [item.partition("=")[2] for item in rest if item.startswith("preset=")]
    if not preset and request.budget is None and request.plan is None:
        preset = ["balanced"]  # the default of `load`
    others = [item for item in rest if not item.startswith("preset=")]
    return {**values, **({"preset": preset[-1]} if preset else {}), "overrides": others}
