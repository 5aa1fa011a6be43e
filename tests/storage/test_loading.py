"""What was saved is read bit for bit under any cut, or it is said what is wrong with it."""

from __future__ import annotations

import itertools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.storage.checkpoint import CheckpointItems, open_checkpoint
from skippipe_jax.storage.loading import load_data_state, load_stage
from tests.harness.messages import refusal
from tests.storage.checkpoints import (
    LAYERS,
    OPTIMIZER,
    abstract,
    assert_same,
    damage,
    stage_state,
    write,
    writer_of,
)


def test_what_is_read_is_what_was_saved(two_checkpoints):
    checkpoint = open_checkpoint(two_checkpoints)
    assert (checkpoint.step, checkpoint.record.stage_layers) == (20, LAYERS)
    for stage in range(2):
        state = stage_state(200 + stage)
        assert_same(load_stage(checkpoint, LAYERS, stage, abstract(state)), state)
    assert load_data_state(checkpoint) == {"position": [20], "epoch": None}


def test_unusual_numbers_keep_their_bits(tmp_path):
    patterns = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0xFF800000], np.uint32)
    floats = jax.device_put(patterns.view(np.float32))
    halves = jax.device_put((patterns >> 16).astype(np.uint16).view(jnp.bfloat16))
    state = {"params": {"floats": floats, "halves": halves, "one": jnp.int32(-1)}}
    writer = writer_of(tmp_path, layers=(1,))
    writer.save(1, CheckpointItems({0: state}), {})
    writer.close()
    assert_same(load_stage(open_checkpoint(tmp_path), (1,), 0, abstract(state)), state)


def test_a_relative_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path.relative_to(tmp_path), [1])
    assert_same(
        load_stage(open_checkpoint(tmp_path), LAYERS, 0, abstract(stage_state(10))), stage_state(10)
    )


# Other cuts.


def model_state(layers):
    """The parameters of a whole model, and what its optimizer holds of them."""
    chance = np.random.default_rng(layers)
    parameters = {
        "blocks": {"w": jnp.zeros((layers, 4, 3)), "norm": {"scale": jnp.zeros((layers, 4))}},
        "embedding": jnp.zeros((7, 4)),
        "head": {"kernel": jnp.zeros((4, 7))},
    }
    parameters["blocks"]["w"] = parameters["blocks"]["w"].astype(jnp.bfloat16)
    state = {"parameters": parameters, "optimizer_state": OPTIMIZER.init(parameters)}
    return jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape) * 99, x.dtype), state)


def stage_of(state, stage_layers, stage):
    """The part of a whole model's state that belongs to a stage."""

    def part(tree):
        first = sum(stage_layers[:stage])
        blocks = jax.tree.map(lambda x: x[first : first + stage_layers[stage]], tree["blocks"])
        return (tree if stage == 0 else {}) | {"blocks": blocks}

    parameters = part(state["parameters"])
    optimizer = jax.tree.map(
        lambda node: part(node) if isinstance(node, dict) else node,
        state["optimizer_state"],
        is_leaf=lambda node: isinstance(node, dict),
    )
    return {"parameters": parameters, "optimizer_state": optimizer}


def write_model(run_dir, state, stage_layers):
    writer = writer_of(run_dir, layers=stage_layers)
    stages = {stage: stage_of(state, stage_layers, stage) for stage in range(len(stage_layers))}
    writer.save(1, CheckpointItems(stages), {})
    writer.close()
    return open_checkpoint(run_dir)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ((1, 4, 2), (3, 1, 3)),
        ((5,), (1, 2, 2)),
        ((1, 2, 2), (5,)),
    ],
)
def test_a_checkpoint_is_read_under_any_cut(tmp_path, saved, wanted):
    state = model_state(sum(saved))
    checkpoint = write_model(tmp_path, state, saved)
    for stage in range(len(wanted)):
        expected = stage_of(state, wanted, stage)
        assert_same(load_stage(checkpoint, wanted, stage, abstract(expected)), expected)


def test_only_stages_with_the_blocks_that_are_wanted_are_read(tmp_path):
    state = model_state(6)
    checkpoint = write_model(tmp_path, state, (1, 3, 1, 1))
    for unwanted in (0, 3):
        shutil.rmtree(checkpoint.folder / f"stage_{unwanted}")
    expected = stage_of(state, (2, 3, 1), 1)
    assert_same(load_stage(checkpoint, (2, 3, 1), 1, abstract(expected)), expected)
    with pytest.raises(InputError, match=r"stage_3/.* = 'missing'"):
        load_stage(checkpoint, (2, 3, 1), 2, abstract(expected))


def test_another_model_under_another_cut(tmp_path):
    """`test_another_model` has the other differences."""
    state = model_state(5)
    checkpoint = write_model(tmp_path, state, (3, 2))
    parameters = stage_of(state, (4, 1), 0)["parameters"]
    for wanted, message in (
        ({"blocks": parameters["blocks"]}, r"parameters/embedding = 'float32\[7, 4\]'"),
        (jax.tree.map(lambda x: x[..., :2], parameters), r"'float32\[3, 4\]'.*float32\[3, 2\]"),
    ):
        with pytest.raises(InputError, match=message):
            load_stage(checkpoint, (4, 1), 0, abstract({"parameters": wanted}))


# Wrong input.


def read_everything(run_dir):
    checkpoint = open_checkpoint(run_dir)
    for part in range(2):
        load_stage(checkpoint, LAYERS, part, abstract(stage_state(part)))
    load_data_state(checkpoint)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def test_every_damaged_file_is_named(run_dir):
    folder = run_dir / "checkpoints" / "00000020"
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "COMMITTED"]
    assert len(files) > 10
    for path, change in zip(files, itertools.cycle([truncate, damage, os.remove])):
        intact = path.read_bytes()
        change(path)
        with refusal(f"{path} = ...previous checkpoint: step 10"):
            read_everything(run_dir)
        path.write_bytes(intact)
    read_everything(run_dir)


def test_a_part_that_the_commit_record_forgot(run_dir):
    path = run_dir / "checkpoints" / "00000020" / "COMMITTED"
    record = json.loads(path.read_bytes())
    record["files"] = {k: v for k, v in record["files"].items() if not k.startswith("stage_1")}
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"stage_1.*missing"):
        read_everything(run_dir)


def test_other_layers(two_checkpoints):
    checkpoint = open_checkpoint(two_checkpoints)
    with pytest.raises(InputError, match=r"stage_layers = \[1, 1\]: .* 2 layers, .* has 3\."):
        load_stage(checkpoint, (1, 2), 0, abstract(stage_state(0)))


def without_a_block(state):
    return state | {"params": {k: v for k, v in state["params"].items() if k != "blocks"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: stage_state(0, width=4),
            r"bfloat16\[1, 8, 8\].*model has bfloat16\[1, 4, 4\]",
        ),
        (
            without_a_block,
            r"params/blocks/w = 'bfloat16\[1, 8, 8\]'.*model has no array of this name",
        ),
        (
            lambda state: state | {"params": state["params"] | {"head": jnp.zeros(3)}},
            r"params/head = 'no array of this name'.*float32\[3\] \(1 of its arrays differ\)",
        ),
        (
            lambda state: state | {"optimizer": optax.sgd(0.1, momentum=0.9).init(state["params"])},
            "optimizer/",
        ),
        (lambda state: state | {"average": jnp.zeros(3)}, "average = 'no array of this name'"),
        (
            lambda state: jax.tree.map(lambda x: x.astype(jnp.float16), state),
            r"count = 'int32\[\]'.*model has float16\[\]",
        ),
    ],
)
def test_another_model(two_checkpoints, change, message):
    with pytest.raises(InputError, match=message):
        load_stage(open_checkpoint(two_checkpoints), LAYERS, 0, abstract(change(stage_state(0))))
