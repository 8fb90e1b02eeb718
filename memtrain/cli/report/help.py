"""`memtrain-report --help`: it teaches by examples."""

import textwrap
from collections.abc import Iterable

from memtrain.cli.models.families import FAMILIES
from memtrain.cli.report.request_fields import OPTIMIZERS
from memtrain.config.sources import options

HELP = """\
usage: memtrain-report model=NAME [key=value ...] [options]
       memtrain-report --diff BEFORE.json AFTER.json

Predict the bytes of a training step without running it: weights, gradients,
optimizer states and saved activations, in plain PyTorch and under a plan. No
weight is allocated.

examples:
  Where does the memory of GPT-2 go, and what does memtrain change?
    memtrain-report model=gpt2 preset=balanced batch=8 seq=1024
  Seven billion parameters on a laptop, in seconds:
    memtrain-report model=llama-7b dtype=bfloat16 seq=2048
  Which ops, which modules, which single tensors?
    memtrain-report model=gpt2 --by op
    memtrain-report model=gpt2 --by module --depth 3 --top 30
    memtrain-report model=gpt2 --by site --top 50
  Other images, another optimizer, another plan:
    memtrain-report model=resnet50 batch=32 image=224 optimizer=sgd
    memtrain-report model=gpt2 preset=smallest activations.min_elements=2048
  Your own model (a function that returns the model and a batch), or a config
  of transformers on disk:
    memtrain-report model=py:my_package.module:build
    memtrain-report model=hf:path/to/config.json
  How large a batch, how long a sequence fit into 24 GiB?
    memtrain-report model=gpt2 memory=24GiB
  What must be compressed, or run again, to fit into 4 GiB? Keep that plan:
    memtrain-report model=gpt2 batch=8 budget=4GiB --plan plan.yaml
    memtrain-report model=gpt2 batch=8 plan=plan.yaml
  The same with step times by what this machine really does:
    memtrain-report --measure-rates rates.yaml
    memtrain-report model=gpt2 batch=8 budget=4GiB rates=rates.yaml
  Is the prediction right? Run it:
    memtrain-report model=resnet18 batch=4 device=cpu --measure
  A page with pictures for a colleague, data for a script:
    memtrain-report model=gpt2 --html gpt2.html --png gpt2.png
    memtrain-report model=gpt2 --json - | jq .categories
  What did my change cost? Fail the build if it is too much:
    memtrain-report model=gpt2 --json before.json
    memtrain-report model=gpt2 preset=smallest --json after.json
    memtrain-report --diff before.json after.json --fail-over 10MiB
    memtrain-report model=gpt2 --fail-over 8GiB --fail-under 3

models: {models}

keys:
  model, batch, seq (text), image (its height and width)
  dtype      float32, bfloat16, float16
  labels     true: the loss's saved tensors count; false: they do not
  attention  eager, sdpa
  dropout    0 turns every dropout of a transformers config off
  optimizer  {optimizers}
  device     cuda, cuda:sm_90 or cpu: whose kernels and allocator the peak is of
  autocast   bfloat16, float16: around the forward whose peak is predicted
  memory     24GiB, 24GB ...: search the largest batch and the longest sequence
             whose predicted peak fits (some minutes)
  budget     24GiB, 24GB ...: plan so that the peak fits (some minutes); what a
             preset's rules say does not count then; with
    allow      quantise,recompute (also: release, weights)
    max_error  1: the most noise, in units of balanced's
    objective  time, error
    rates      a file of --measure-rates, or measure: step times by what this
               device does (without: by bytes and work alone)
  plan       a plan file in place of the keys below
  preset     {presets}
  and any key of memtrain's config

options:
  --by WHAT    sum the largest rows by pattern (h.*.mlp; the default), site,
               module or op
  --depth N    with --by module: no deeper than N names (0: all)
  --top N      how many of them to show (10)
  --json FILE  write the report as JSON (docs/guides/report.md describes it)
  --csv FILE   write its rows; - instead of a file is the standard output, and
               then no table is printed
  --html FILE  write a page that stands alone: bars, treemap, timeline
  --png FILE   draw bars, and the timeline of the peak (needs matplotlib)
  --plan FILE  write the plan, for plan= and wrap(model, optimizer, FILE)
  --measure-rates FILE  time copies, matrix products and codes on this device
               (device=, dtype=), for rates=
  --gradients  build the model for real, run one batch, and tell what the plan
               does to its gradient, as a whole and site by site (takes a
               training step's memory, and some passes a site)
  --measure    build the model for real and run steps, plain and planned: their
               peaks beside the predicted ones (takes a step's memory)
  --snapshot FILE  with --measure on CUDA: torch's snapshot of the allocator in
               the planned step, for docs.pytorch.org/memory_viz
  --no-peak    leave out the peak: faster, as no backward and no update is
               simulated
  --fail-over SIZE    exit status 3 if the planned peak (with --no-peak: the
               planned total) is above SIZE: 24GiB is 24 * 2**30 bytes, 24GB
               is 24 * 10**9; with --diff, if it grew by more than SIZE
  --fail-under RATIO  exit status 3 if plain PyTorch takes less than RATIO
               times as much
  --diff BEFORE AFTER  compare two --json files

exit status: 0 done, 1 the model could not be traced, 2 wrong arguments or a
file that cannot be read or written, 3 --fail-over or --fail-under, or nothing
fits the budget, 130 interrupted
"""


def help_text() -> str:
    """The text, with the models, optimizers and presets there are."""

    def wrapped(names: Iterable[str], indent: int) -> str:
        lines = textwrap.wrap(", ".join(names), 80 - indent, break_on_hyphens=False)
        return ("\n" + " " * indent).join(lines)

    return HELP.format(
        models=wrapped(FAMILIES, 8),
        optimizers=wrapped(OPTIMIZERS, 13),
        presets=wrapped(options("preset"), 13),
    )
