"""axolotl, which checks and trains a config of its own: `python examples/axolotl_train.py`."""

import json
import tempfile

from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.train import train
from axolotl.utils.dict import DictDefault
from tiny import arguments, llama, logged, report, tokens
from trl_sft import tokenizer

SHARED = tempfile.mkdtemp()


def config(preset, folder):
    """The config that a user writes as YAML."""
    given = arguments()
    return {
        "base_model": f"{SHARED}/model", "output_dir": folder,
        "datasets": [{"path": f"{SHARED}/rows.jsonl", "ds_type": "json", "type": None}],
        "dataset_prepared_path": f"{SHARED}/prepared",
        "sequence_len": 64, "val_set_size": 0, "special_tokens": {"pad_token": "<0>"},
        "micro_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": "adamw_torch",
        "lr_scheduler": "linear", "learning_rate": given["learning_rate"], "max_grad_norm": 1.0,
        **{name: given[name] for name in ("max_steps", "save_steps", "logging_steps")},
        "bf16": False, "tf32": False, "attn_implementation": "sdpa",
        **({
            "plugins": ["memtrain.integrations.axolotl.MemtrainPlugin"],  # line 1
            "memtrain": preset,  # line 2
        } if preset else {}),
    }  # fmt: skip


def run(preset, folder, resume):
    """Losses of each step, and the model."""
    written = config(preset, folder)
    if resume:
        written["resume_from_checkpoint"] = f"{folder}/checkpoint-{written['save_steps']}"
    cfg = load_cfg(DictDefault(written))
    data = load_datasets(cfg=cfg, cli_args=TrainerCliArgs())
    trainer = train(cfg=cfg, dataset_meta=data)[2]
    return logged(trainer, resume), trainer.model


if __name__ == "__main__":
    llama().save_pretrained(f"{SHARED}/model")
    tokenizer().save_pretrained(f"{SHARED}/model")
    with open(f"{SHARED}/rows.jsonl", "w") as file:
        for row in tokens():
            ids = row["input_ids"].tolist()
            own = {"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}
            file.write(json.dumps(own) + "\n")
    report(2, ["axolotl", "transformers", "accelerate"], run)
