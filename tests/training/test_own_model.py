"""`memtrain-train model=hf:... data=text:...`: the user's model and data."""

import os
import resource
import shutil
from functools import partial

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from memtrain.training import checkpoint, forecast
from memtrain.training.pretrained import Pretrained
from memtrain.training.session import Session
from memtrain.training.settings import compose, from_mapping
from tests.equality import differences
from tests.training.runs import at_step, killed, resumed

LINES = "".join(f"line {n}: the quick brown fox counts {n * n}\n" for n in range(400))
SHORT = [
    "data.sequence=32", "training.steps=6", "training.batch=4", "training.warmup=1",
    "training.eval_every=3", "training.eval_batches=2", "training.checkpoint_every=2",
    "training.meter_every=0", "optimizer.lr=1e-2", "output.quiet=true",
]  # fmt: skip


def tokenizer_of(words):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>"]
    vocabulary = {word: place for place, word in enumerate([*special, *sorted(set(words))])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{name[1:-1]}_token": name for name in special}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models as `save_pretrained` writes them, and a text."""
    root = tmp_path_factory.mktemp("own")
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text(LINES)
    tokenizer = tokenizer_of(LINES.replace(":", " : ").split())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
    llama.save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2))
    gpt2.save_pretrained(root / "gpt2", max_shard_size="20KB")
    return root


@pytest.fixture
def made(folders, tmp_path):
    """Makes the session of a short run, with overrides."""

    def make(*overrides, console=None, short=SHORT):
        given = [f"model=hf:{folders / 'llama'}", f"data=text:{folders / 'text'}"]
        named = {override.partition("=")[0] for override in overrides}
        given = [override for override in given if override.partition("=")[0] not in named]
        given.append(f"output.folder={tmp_path}/outputs")
        config = from_mapping(compose([*given, *short, *overrides]))
        return Session(config, console=console)

    return make


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def losses(session, split="train"):
    return [(row.step, row.loss) for row in session.rows if row.split == split]


def test_a_folder_trains_and_what_is_left_loads(made, folders):
    console = Console(record=True, width=200)
    session = made("output.quiet=false", "training.meter_every=1", console=console)
    summary = session.train()["wrapped"]
    first, last = losses(session, "validation")[0][1], summary["validation_loss"]
    assert last < first
    text = console.export_text()
    assert "peak of a step" in text
    assert "predicted for a batch of 4 rows" in text
    assert summary["bytes"]["peak"] == pytest.approx(session._forecasts["wrapped"], rel=0.03)
    assert "promised peak" in text.splitlines()[-2]
    model = weights_of(session.folder / "wrapped_model")
    assert differences(model, checkpoint.read_checkpoint(session.folder)["current"]["model"]) == []
    tokenizer = AutoTokenizer.from_pretrained(session.folder / "wrapped_model")
    assert (
        tokenizer("the fox")["input_ids"]
        == AutoTokenizer.from_pretrained(folders / "llama")("the fox")["input_ids"]
    )
    names = {item.name for item in session.folder.iterdir()}
    assert names == {
        "config.yaml", "metrics.csv", "summary.json", "checkpoint.pt", "wrapped_model",
    }  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["preset=balanced", "model.dropout=0.1"], id="balanced"),
        pytest.param(
            ["preset=all_four", "training.accumulate=2"], id="all_four", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_run_that_was_killed_goes_on_bit_for_bit(made, folders, overrides):
    model = f"model=hf:{folders / 'gpt2'}"
    tokens = ["data.tokenizer=bytes"]
    straight = made(model, *tokens, *overrides)
    straight.train()
    broken_off = made(model, *tokens, *overrides)
    with at_step(6, killed), pytest.raises(MemoryError):
        broken_off.train()
    again = resumed(broken_off.folder)
    again.train()
    assert losses(again) == losses(straight)
    assert losses(again, "validation") == losses(straight, "validation")
    ends = [weights_of(one.folder / "wrapped_model") for one in (again, straight)]
    assert differences(*ends) == []


def test_microbatches_are_the_batch_up_to_rounding(made):
    """Rows have different numbers of targets, by which the microbatches are weighted."""
    data = [f"data=py:{__name__}:Masked", "data.validation=0"]
    short = [override for override in SHORT if override != "data.sequence=32"]
    made = partial(made, short=short)
    plain = ["training.runs=[plain]", "training.steps=2", *data]
    whole, parts = (made(*plain, f"training.accumulate={n}") for n in (1, 4))
    whole.train()
    parts.train()
    for (_, a), (_, b) in zip(losses(whole), losses(parts), strict=True):
        assert b == pytest.approx(a, rel=1e-5)  # a mean over a few hundred targets, in float32


def test_documents_follow_one_another_in_rows(made, folders, tmp_path):
    for name, words in (("a.txt", "line 1 : the fox"), ("b.txt", "the quick brown")):
        (tmp_path / name).write_text(words)
    sizes = ["data.sequence=4", "data.validation=0", "training.batch=2"]
    source = made(f"data=text:{tmp_path}", "data.files=*.txt", *sizes).source
    tokenizer = AutoTokenizer.from_pretrained(folders / "llama")
    first, second = (tokenizer(text)["input_ids"] for text in ("line 1 : the fox", "the quick"))
    batch = source.collate([0, 1])
    assert batch["input_ids"].tolist() == [first[:4], [first[4], tokenizer.eos_token_id, *second]]
    assert batch["labels"][:, 0].tolist() == [-100, -100]
    assert batch["labels"][:, 1:].equal(batch["input_ids"][:, 1:])


def test_rows_do_not_depend_on_the_part_that_reads_them(made, folders):
    source = made("training.batch=4").source
    whole = source.batch("train", 7, 4)
    again = [source.batch("train", 7, 4, part) for part in (slice(0, 1), slice(1, 4))]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([part[name] for part in again]))
    epoch = len(source.parts["train"]) // 4
    seen = [
        tuple(row)
        for n in range(epoch)
        for row in source.batch("train", n, 4)["input_ids"].tolist()
    ]
    assert len(set(seen)) == len(seen)


def test_a_peak_that_does_not_fit_is_reported_before_the_first_step(made, monkeypatch):
    monkeypatch.setattr(forecast, "available_bytes", lambda device, used: 2**17)
    text = " ".join(made("preset=exact")._lines)
    assert "that does not fit: 128.00 KiB are free on cpu" in text
    assert "what would help: budget=128.00KiB plans for it" in text


def own_model():
    """What `model=py:` calls."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    )


def falls(session):
    """Train: the measured peak is the predicted one, and the held-out loss falls."""
    summary = session.train()["wrapped"]
    promised, measured = session._forecasts["wrapped"], summary["bytes"]["peak"]
    assert abs(promised - measured) < max(0.03 * measured, 2 * 2**20)
    assert summary["validation_loss"] < losses(session, "validation")[0][1]
    return session.folder / "wrapped_model"


METERED = ["training.meter_every=5", "training.eval_every=0"]


class Digits(torch.utils.data.Dataset):
    """What `data=py:` calls: rows of counted tokens."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 256
        return {"input_ids": tokens, "labels": tokens}


class Masked(Digits):
    """Rows of which a different number of tokens is learned."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        learned = (torch.arange(16) > 0) & (torch.arange(16) <= 1 + index % 14)
        return {**row, "labels": torch.where(learned, row["labels"], -100)}


def numbers():
    return [1, 2, 3]


def test_a_users_functions_make_the_model_and_the_data(made):
    functions = [f"model=py:{__name__}:own_model", f"data=py:{__name__}:Digits"]
    short = [override for override in SHORT if override != "data.sequence=32"]
    session = made(*functions, *METERED, short=short)
    assert len(session.source.parts["validation"]) == 4
    falls(session)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", "float32"), ("float32", "float32"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")],
)
def test_dtypes_are_named_in_short_or_in_full(folders, name, dtype):
    model = Pretrained(path=str(folders / "llama"), dtype=name).build()
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


BAD = {
    "no weights": (["model=hf:{config}"], "has no weights .*model.weights=random"),
    "no folder": (
        ["model=hf:{root}/nowhere"],
        "nowhere/?'? does not exist|nowhere' does not exist",
    ),
    "no data": (["data=text:{root}/nothing.txt"], "nothing.txt' does not exist"),
    "empty": (["data=text:{empty}"], "has no text in it"),
    "short": (["data=text:{short}"], "the text has 3 tokens; allowed: at least one row"),
    "not utf-8": (["data=text:{binary}"], "not UTF-8 at byte 3; .*data.tokenizer=bytes"),
    "tokenizer": (
        ["model=hf:{root}/gpt2", "data.tokenizer={root}/llama"],
        "do not belong together",
    ),
    "no tokenizer": (["model=hf:{root}/gpt2"], "has no tokenizer; .*data.tokenizer=bytes"),
    "too long": (["data.sequence=65"], "the model takes at most 64 tokens"),
    "encoder": (["model=hf:{bert}"], "BertConfig.* is not a causal language model; .*model=py"),
    "rows": (["data=py:{rows}:numbers", "-"], "a row is a int; allowed: a dict of tensors"),
    "dataset": (["data=py:json:loads", "-"], "data='py:json:loads' raised TypeError"),
    "batch": (["training.batch=5", "training.accumulate=2"], "not a multiple of"),
    "key": (["model.wieghts=random"], "nearest valid: model.weights"),
    "dtype": (["model.dtype=fp16"], "model.dtype='fp16' is unknown; did you mean 'bf16'"),
    "no path": (["model=hf"], "model=hf needs a path: model=hf:<path>"),
    "budget": (["budget=100KiB"], "is too small: the smallest peak found"),
    "function": (["model=py:json:nothing"], "json has no function 'nothing'"),
}


SLOW = ("budget",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if n in SLOW else n for n in BAD]
)
def test_bad_input_raises_before_the_first_step(made, folders, tmp_path, name):
    files = {"empty": "", "short": "the fox", "config": (folders / "llama/config.json").read_text()}
    paths = {"root": folders, "binary": tmp_path / "binary"}
    paths["binary"].write_bytes(b"abc\xff")
    BertConfig().save_pretrained(tmp_path / "bert")
    paths |= {"bert": tmp_path / "bert", "rows": __name__}
    for key, content in files.items():
        paths[key] = tmp_path / f"{key}.{'json' if key == 'config' else 'txt'}"
        paths[key].write_text(content)
    overrides, message = BAD[name]
    short = [item for item in SHORT if "-" not in overrides or not item.startswith("data.")]
    given = [override.format(**paths) for override in overrides if override != "-"]
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        made(*given, short=short).train()
    assert not list(tmp_path.rglob("metrics.csv"))


def llama7b(tmp_path, *overrides):
    given = ["experiment=llama7b", f"output.folder={tmp_path}/outputs", "output.quiet=true"]
    return Session(from_mapping(compose([*given, *overrides])))


def scaled_down(tmp_path):
    """The seven billion's config, with a thousandth of them."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    LlamaConfig(
        **sizes, num_attention_heads=4, vocab_size=8192, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    steps = ["training.steps=3", "training.meter_every=1", "training.checkpoint_every=2"]
    return [f"model.path={tmp_path}", "data.sequence=64", *steps]


def test_a_scaled_down_llama7b_takes_the_predicted_bytes_and_resumes(tmp_path):
    overrides = scaled_down(tmp_path)
    session = llama7b(tmp_path, *overrides)
    summary = session.train()["wrapped"]
    promised, held = session._forecasts["wrapped"], summary["bytes"]
    assert abs(promised - held["peak"]) < max(0.03 * held["peak"], 2 * 2**20)
    shapes = [x.shape for x in weights_of(session.folder / "wrapped_model").values()]
    # codes and scales of 128, two pairs of vectors; both moments of a norm's weight
    wide = [34 * -(-x.numel() // 128) + 8 * sum(x) for x in shapes if len(x) > 1]
    narrow = [8 * x[0] for x in shapes if len(x) == 1]
    assert held["states"] == sum(wide) + sum(narrow) + 4 * len(shapes)
    stopped = llama7b(tmp_path, *overrides)
    with at_step(1, stopped.stop), pytest.raises(KeyboardInterrupt):
        stopped.train()
    again = resumed(stopped.folder)
    again.train()
    ends = [weights_of(one.folder / "wrapped_model") for one in (session, again)]
    assert differences(*ends) == []


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.disk_usage("/").free < 48 * 2**30
    or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 20 * 2**30,
    reason="takes 16 GiB of memory and 45 GB of disk",
)
def test_seven_billion_parameters_train_in_16_gib(tmp_path):
    session = llama7b(tmp_path)
    summary = session.train()["wrapped"]
    peak = summary["bytes"]["peak"]
    assert abs(session._forecasts["wrapped"] - peak) < 0.03 * peak
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 16 * 2**20  # KiB
    rows = losses(session)
    assert rows[-1][1] < rows[0][1]
