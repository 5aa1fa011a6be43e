"""Evaluation of a real run, against the same numbers computed by hand."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from skippipe_sched.errors import InputError

from skippipe_jax import evaluate
from skippipe_jax.checkpoint import CheckpointWriter, open_checkpoint, read_stage
from skippipe_jax.cluster import Membership
from skippipe_jax.config import load_config
from skippipe_jax.evaluate import Evaluation, evaluate_run, held_out_loss
from skippipe_jax.model import DataStage, ModelConfig, stage_shapes
from skippipe_jax.tokenizer import ByteTokenizer
from skippipe_jax.trainer import train

STAGES, TIME, MICROBATCH = 3, 32, 2
CONFIG: dict[str, Any] = {
    "run_dir": "run",
    "compilation_cache": None,
    "model": {
        "width": 16,
        "layers": 3,
        "heads": 2,
        "kv_heads": 1,
        "ffn_width": 24,
        "context": TIME,
    },
    "plan": {
        "case": {
            "nodes": 3,
            "locations": ["here"],
            "links": [],
            "activation_bytes": 4096,
            "stage_bytes": 8192,
            "forward_s": 0.1,
            "stages": [1, 1, 1],
            "path_length": 2,
            "microbatches_per_data_node": 8,
            "memory": 2,
        },
        "method": "balanced",
    },
    "data": {
        "source": "text",
        "path": "text",
        "sequence_length": TIME,
        "microbatch_size": MICROBATCH,
        "held_out": 0.25,
    },
    "optimizer": {"learning_rate": 0.03, "warmup_steps": 1},
    "train": {"steps": 6},
    "checkpoint": {"every": 3, "keep": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run has been trained; its text is two thirds a and one third b."""
    folder = tmp_path_factory.mktemp("evaluate")
    letters = np.random.default_rng(0).choice(list(b"aab"), 3000).astype(np.uint8)
    (folder / "text").write_bytes(letters.tobytes())
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with contextlib.chdir(folder):
        config = load_config(Path("config.yaml"))
        alone = Membership(config.cluster, index=0, count=1)
        train(config, alone, resume=False, config_folder=folder)
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def held_out_windows() -> np.ndarray:
    """The last quarter of the text, marked at both ends, in windows that do not overlap."""
    text = Path("text").read_bytes()[3000 * 3 // 4 :]
    tokens = np.array([ByteTokenizer.begin, *text, ByteTokenizer.end])
    count = len(tokens) // (TIME + 1)
    return tokens[: count * (TIME + 1)].reshape(count, TIME + 1)


def read_parameters(model: ModelConfig, step: int) -> list[dict[str, Any]]:
    checkpoint = open_checkpoint(Path("run"), step)
    return [
        read_stage(checkpoint, checkpoint.stage_layers, stage, {"parameters": shapes})["parameters"]
        for stage, shapes in enumerate(stage_shapes(model, STAGES))
    ]


def loss_by_hand(step: int) -> float:
    """Mean over all held-out targets, by one module that holds the layers of all stages."""
    model = load_config(Path("config.yaml")).model
    stages = read_parameters(model, step)
    layers = [stage["blocks"] for stage in stages]
    whole = stages[0] | {"blocks": jax.tree.map(lambda *own: np.concatenate(own), *layers)}
    structure = nnx.graphdef(nnx.eval_shape(lambda: DataStage(model, 3, 0, jax.random.key(0))))

    @jax.jit
    def logits_of(parameters: Any, tokens: jax.Array) -> jax.Array:
        module: DataStage = nnx.merge(structure, parameters)
        return module.logits(module(tokens))

    windows = held_out_windows()
    logits = np.asarray(logits_of(whole, windows[:, :-1]), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return -np.log(np.take_along_axis(chances, windows[:, 1:, None], axis=-1)).mean()


def test_loss_is_the_mean_over_the_held_out_text():
    found = evaluate_run(Path("run"), None, 256)
    assert (found.step, found.tokens) == (6, held_out_windows()[:, 1:].size)
    assert abs(found.loss - loss_by_hand(6)) < 1e-5
    assert found.perplexity == math.exp(found.loss)
    # A model that knows the two letters, and no other byte, does better than guessing.
    assert found.loss < 0.7 * math.log(259)


def test_an_earlier_checkpoint_can_be_chosen():
    found = evaluate_run(Path("run"), 3, 256)
    assert found.step == 3
    assert abs(found.loss - loss_by_hand(3)) < 1e-5
    assert found.loss > evaluate_run(Path("run"), 6, 256).loss


@pytest.mark.parametrize(("sequences", "evaluated"), [(1, 1), (3, 2), (4, 4), (999, 22)])
def test_no_more_sequences_are_read_than_asked_for(sequences: int, evaluated: int):
    assert len(held_out_windows()) == 22
    assert evaluate_run(Path("run"), None, sequences).tokens == evaluated * TIME


def run_main(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    assert evaluate.main() == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = run_main(["--run", "run", "--step", "3", "--json"], monkeypatch, capsys)
    assert Evaluation(**json.loads(out)) == evaluate_run(Path("run"), 3, 256)


def test_text_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = evaluate_run(Path("run"), None, 256)
    out = run_main(["--run", "run"], monkeypatch, capsys)
    assert out.startswith("step 6: ")
    for words in (f"{found.loss:.4f}", f"{found.perplexity:.3f}", f"{found.tokens:,} tokens"):
        assert words in out


def test_a_run_that_used_the_attention_of_gpus_can_be_evaluated_without_one():
    config = load_config(
        Path("config.yaml"), ["model.attention=cudnn", "model.compute_dtype=bfloat16"]
    )
    parameters = read_parameters(config.model, 6)
    loss, _ = held_out_loss(config, parameters, 256)
    assert abs(loss - loss_by_hand(6)) < 0.02


def test_a_model_that_has_diverged_has_no_perplexity(tmp_path: Path):
    config = load_config(Path("config.yaml"))
    stages = read_parameters(config.model, 6)
    stages[0]["head"]["kernel"] *= 1e6
    shutil.copy("run/config.yaml", tmp_path)
    with contextlib.closing(
        CheckpointWriter(
            tmp_path, Membership(config.cluster, 0, 1), stage_layers=(1,) * STAGES, keep=1
        )
    ) as writer:
        writer.save(7, {stage: {"parameters": own} for stage, own in enumerate(stages)}, {})
    with pytest.raises(InputError, match="training had diverged") as caught:
        evaluate_run(tmp_path, None, 256)
    assert (caught.value.field, caught.value.value) == ("--step", 7)
