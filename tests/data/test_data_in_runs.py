"""A run trains on the user's own text and tokenizer, and keeps what its evaluation needs."""

import json
import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, DocumentSource, load_config, to_tree
from skippipe_jax.data.batches import TrainingBatches
from skippipe_jax.data.documents import Document
from skippipe_jax.data.tokenizing import train_bpe
from skippipe_jax.training.trainer import Trainer
from tests.data.test_chat import conversations
from tests.harness.partial_models import evaluate_run
from tests.harness.training_runs import write_config

CASE = {
    "nodes": 2,
    "locations": ["here"],
    "links": [],
    "activation_bytes": 1024,
    "stage_bytes": 1024,
    "forward_s": 0.1,
    "stages": [1, 1],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}


def train_alone(config: Config, folder: Path) -> None:
    alone = Membership(config.cluster, 0, 1)
    Trainer(config, host=alone, config_folder=folder).run()


def test_own_rows_and_tokenizer(tmp_path):
    random = np.random.default_rng(0)
    words = ["stage", "skip", "swap", "pipeline", "node", "path"]
    rows = [" ".join(random.choice(words, 40)) for _ in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = DocumentSource("text", "rows")
    train_bpe(((Document("", b"", row.encode()), source) for row in rows), 280, tmp_path / "bpe")
    data = {
        "source": "jsonl",
        "path": str(tmp_path / "rows.jsonl"),
        "tokenizer": str(tmp_path / "bpe"),
        "sequence_length": 32,
        "microbatch_size": 2,
    }
    plan = {"method": "balanced", "case": CASE}
    file = write_config(tmp_path, plan=plan, data=data, train={"steps": 3})

    def config(name: str, *overrides: str) -> Config:
        return load_config(file, [f"run_dir={tmp_path / name}", "model.layers=2", *overrides])

    vocabulary = "model.vocabulary_size=280"
    with pytest.raises(InputError, match="is too small for the tokenizer"):
        train_alone(config("small", "model.vocabulary_size=270"), tmp_path)
    assert not (tmp_path / "small").exists()
    train_alone(config("ahead", vocabulary), tmp_path)
    assert not [one for one in threading.enumerate() if one.name.startswith("read_ahead")]

    before = evaluate_run(tmp_path / "ahead", None, 8)
    shutil.move(tmp_path / "bpe", tmp_path / "moved")
    assert evaluate_run(tmp_path / "ahead", None, 8) == before
    with pytest.raises(InputError, match=r"data\.tokenizer"):
        TrainingBatches(config("ahead", vocabulary).data)


def test_a_run_says_how_many_conversations_are_too_long_and_an_older_one_goes_on(tmp_path, capsys):
    turns = [(f"{number}", "a" * (2 if number % 4 else 40)) for number in range(40)]
    data = to_tree(replace(conversations(tmp_path, turns), sequence_length=32))
    plan = {"method": "balanced", "case": CASE}
    file = write_config(tmp_path, plan=plan, data=data)

    def set_up(*overrides: str, resume: bool = False) -> None:
        config = load_config(file, [f"run_dir={tmp_path / 'run'}", "model.layers=2", *overrides])
        with closing(Trainer(config, resume=resume, config_folder=tmp_path)) as trainer:
            trainer.setup()

    split = "data.too_long=split"
    set_up(split)
    said = capsys.readouterr().out
    assert said.count("longer than a sequence of 32 tokens, and split (data.too_long)") == 1
    # The file of a run from before there was a choice says nothing of it.
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    del saved["data"]["too_long"]
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(InputError, match=r'Set data\.too_long="split"'):
        set_up(resume=True)
    set_up(split, resume=True)
