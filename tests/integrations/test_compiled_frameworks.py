"""Models that a training framework compiles: their graphs are compressed, and nothing is warned."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memtrain
from memtrain.audit.live_storages import storage_nbytes
from memtrain.integrations import accelerate as own_accelerate
from memtrain.integrations.lightning import memtrain_callback
from memtrain.integrations.transformers import memtrain_trainer
from tests.graphs import graph_nodes

BACKEND = "aot_eager"  # of those that accelerate takes, one that generates no code
STEPS, ROWS, WIDTH = 3, 32, 64

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.h = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, x, labels=None):
        y = self.first(x)
        for block in self.h:
            y = block(y)
        return {"loss": F.mse_loss(y, labels), "logits": y}


def rows(count=STEPS * ROWS):
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": -row} for row in x]


def batch(step):
    found = rows()[ROWS * step : ROWS * (step + 1)]
    return {name: torch.stack([row[name] for row in found]) for name in found[0]}


def held(loss, model, given):
    """Bytes that the nodes of a loss's graph hold, and the graphs of the compiler among them."""
    nodes = graph_nodes(loss)
    saved = [x for node in nodes for x in getattr(node, "saved_tensors", ()) if x is not None]
    nbytes = storage_nbytes(saved, exclude=[loss, *given.values(), *model.parameters()])
    return nbytes, sum("CompiledFunction" in node.name() for node in nodes)


def by_trainer(preset, folder, found):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Watched(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            found.append((loss.item(), *held(loss, self.model, inputs)))
            return loss

    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, max_steps=STEPS, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no", learning_rate=1e-2,
        torch_compile=True, torch_compile_backend=BACKEND,
    )  # fmt: skip
    cls = memtrain_trainer(Watched, preset) if preset else Watched
    trainer = cls(model=Model(), args=args, train_dataset=rows())
    trainer.train()
    return trainer.model


def by_accelerate(preset, _, found, *, regional=False, after=False):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    plugin = accelerate.utils.TorchDynamoPlugin(backend=BACKEND, use_regional_compilation=regional)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrap = own_accelerate.wrap if preset else lambda accelerator, *both: both
    given = (preset,) if preset else ()
    both = model, optimizer
    if not after:
        both = wrap(accelerator, *both, *given)
    both = accelerator.prepare(*both)
    if after:
        both = wrap(accelerator, *both, *given)
    run, optimizer = both
    for step in range(STEPS):
        given = batch(step)
        loss = run(**given)["loss"]
        found.append((loss.item(), *held(loss, model, given)))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return run if after and regional else model  # regions are compiled in a copy


def by_lightning(preset, _, found, *, inside):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def configure_model(self):
            if inside:
                self.model.compile(backend=BACKEND)

        def training_step(self, given, _):
            return self.model(**given)["loss"]

        def on_train_batch_start(self, given, _):
            self.given = given

        def on_before_backward(self, loss):
            found.append((loss.item(), *held(loss, self, self.given)))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        callbacks=[memtrain_callback(preset)] if preset else [],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(rows(), batch_size=ROWS)
    trainer.fit(module if inside else torch.compile(module, backend=BACKEND), data)
    return module


WAYS = {
    "Trainer": by_trainer,
    "accelerate": by_accelerate,
    "accelerate, wrapped last": partial(by_accelerate, after=True),
    "accelerate, by regions": partial(by_accelerate, regional=True),
    "accelerate, by regions, wrapped last": partial(by_accelerate, regional=True, after=True),
    "Lightning": partial(by_lightning, inside=False),
    "Lightning, in configure_model": partial(by_lightning, inside=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_framework_compiles_is_compressed_without_a_word(way, tmp_path):
    plain, states_only, compressed = [], [], []
    WAYS[way](None, tmp_path, plain)
    WAYS[way]("optimizer_only", tmp_path, states_only)  # the factored moment makes another step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = WAYS[way]("balanced", tmp_path, compressed)
    assert [str(one.message) for one in caught if "memtrain" in str(one.message)] == []
    assert len(plain) == len(compressed) == STEPS
    for (_, before, _), (expected, _, _), (loss, now, graphs) in zip(
        plain, states_only, compressed, strict=True
    ):
        assert graphs > 0  # compiled, not run as it is
        assert now < before / 3
        assert abs(loss - expected) < 0.02 * expected
    # nodes show what graphs hold, not what is packed outside of them
    rows = memtrain.plan_of(model).entries("activation")
    seen = [row for row in rows if "regions" not in way or not row.site.startswith("(root)")]
    planned = sum(row.planned for row in seen)
    given = batch(0)["x"].nbytes  # a part's graph does not know that an input stays alive anyway
    assert compressed[0][1] in (planned, planned - given, planned - 2 * given)
    if "regions" in way:  # blocks that are equal run one graph
        modules = {row.site.partition(" / ")[0].replace("._orig_mod", "") for row in rows}
        assert modules >= {"h.0", "h.1"}
