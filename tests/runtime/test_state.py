"""The state of a run that goes on: what is read, how often, and what room that takes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import pytest

from skippipe_jax.config import Config, DataConfig
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.state import StageState, StateReader, from_checkpoint, make_states
from skippipe_jax.storage import loading
from skippipe_jax.storage.arrays import read_arrays
from skippipe_jax.storage.checkpoint import Checkpoint, open_checkpoint
from skippipe_jax.storage.checkpointer import write_initial_checkpoint
from tests.harness.one_host import open_alone
from tests.harness.training_runs import assert_same_bits, by_name
from tests.runtime.test_oracle import BATCH, SMALL, TIME
from tests.sched.examples import plan_of

# Three replicas of the second stage, each on a device of its own.
PLAN = plan_of([[0], [1, 2, 3]], [[0, 1], [0, 2], [0, 3]])
MODEL = replace(SMALL, layers=2)
CONFIG = Config(model=MODEL, data=DataConfig(sequence_length=TIME, microbatch_size=BATCH))
CUT = MODEL.stage_partition(2)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return open_alone(CONFIG, PLAN, devices=4)


@pytest.fixture(scope="module")
def checkpoint(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Of numbers that no new run begins with."""
    random = np.random.default_rng(0)

    def drawn(leaf: jax.Array) -> jax.Array:
        return jax.numpy.asarray(random.uniform(1, 99, leaf.shape), leaf.dtype)

    folder = tmp_path_factory.mktemp("run")
    stages = runtime.checkpoint_items(1).stages
    write_initial_checkpoint(folder, 7, CUT, lambda stage: jax.tree.map(drawn, stages[stage]))
    return open_checkpoint(folder)


def resumed(runtime: Runtime, origin: Checkpoint | StateReader) -> dict[int, StageState]:
    """The states of all replicas, as a checkpoint or another origin has them."""
    if isinstance(origin, Checkpoint):
        origin = from_checkpoint(origin, CUT)
    return make_states(CONFIG, runtime.topology, origin)


def bytes_of(tree: Any) -> int:
    """Of the buffers of arrays, some of which may have several arrays."""
    buffers = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(tree)}
    return sum(buffers.values())


def test_every_replica_goes_on_with_what_was_saved(runtime: Runtime, checkpoint: Checkpoint):
    states = resumed(runtime, checkpoint)
    assert list(states) == [0, 1, 2, 3]
    for node, state in states.items():
        stage = PLAN.stage_of[node]
        saved = runtime.checkpoint_items(1).stages[stage]
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        expected = loading.load_stage(checkpoint, CUT, stage, shapes)
        assert_same_bits(by_name(state.to_save()), by_name(expected))
        assert not any(leaf.any() for leaf in jax.tree.leaves(jax.device_get(state.gradients)))
        # Zeros too lie where they are used, not all on the first device.
        device = runtime.topology.device(node)
        everything = (state.to_save(), state.gradients)
        assert {d for leaf in jax.tree.leaves(everything) for d in leaf.devices()} == {device}


def test_a_stage_is_read_and_hashed_once_however_many_replicas_it_has(
    runtime: Runtime, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    hashed, read = Counter[str](), Counter[str]()

    def require_intact(checkpoint: Checkpoint, part: str) -> None:
        hashed[part] += 1

    def counted(folder: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
        read[folder.name] += 1
        return read_arrays(folder, wanted)

    monkeypatch.setattr(loading, "require_intact", require_intact)
    monkeypatch.setattr(loading, "read_arrays", counted)
    resumed(runtime, checkpoint)
    assert hashed == read == {"stage_0": 1, "stage_1": 1}


def test_a_run_that_begins_with_weights_has_zeros_where_they_are_used(runtime: Runtime):
    def origin(stage: int, shapes: Any) -> Any:
        return {
            "parameters": jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes["parameters"])
        }

    for node, state in resumed(runtime, origin).items():
        device = runtime.topology.device(node)
        everything = (state.to_save(), state.gradients)
        assert {d for leaf in jax.tree.leaves(everything) for d in leaf.devices()} == {device}
        moments = jax.tree.leaves(jax.device_get(state.optimizer_state))
        assert not any(leaf.any() for leaf in moments)


def test_a_stage_that_moves_within_a_host_is_copied_there(runtime: Runtime, checkpoint: Checkpoint):
    """As where another device of the host has had it before; nothing is drawn or read anew."""
    states = resumed(runtime, checkpoint)
    devices, sharding = runtime.topology.device, runtime.topology.sharding
    kept = {(0, sharding(3)): states[0], (1, sharding(1)): states[1]}
    own = make_states(CONFIG, runtime.topology, None, kept)
    assert own[1] is states[1]
    for node in (0, 2, 3):
        assert own[node] is not states[node]
        assert_same_bits(by_name(own[node].to_save()), by_name(states[node].to_save()))
        arrays = jax.tree.leaves((own[node].to_save(), own[node].gradients))
        assert {device for leaf in arrays for device in leaf.devices()} == {devices(node)}
    [only] = make_states(CONFIG, runtime.topology, None, kept, stages=[0])
    assert only == 0


Made = TypeVar("Made")


def most_besides(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made]) -> tuple[Made, int]:
    """What is made, and how many bytes there are at most meanwhile beside those before."""
    gc.collect()
    before, peak = bytes_of(jax.live_arrays()), 0
    own_put = jax.device_put

    def device_put(*arguments: Any, **options: Any) -> Any:
        nonlocal peak
        placed = own_put(*arguments, **options)
        peak = max(peak, bytes_of(jax.live_arrays()) - before)
        return placed

    monkeypatch.setattr(jax, "device_put", device_put)
    made = make()
    monkeypatch.undo()
    return made, peak


def test_devices_never_hold_more_than_the_state_that_they_go_on_with(
    runtime: Runtime, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is allocated to be overwritten, and what is read does not pass through a device."""
    resumed(runtime, checkpoint)  # What compiling leaves is there before.
    states, peak = most_besides(monkeypatch, lambda: resumed(runtime, checkpoint))
    held = sum(bytes_of((state.to_save(), state.gradients)) for state in states.values())
    assert 0 < peak <= held


def test_states_that_are_kept_have_no_gradients_beside_their_gradients(
    runtime: Runtime, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    states, topology = resumed(runtime, checkpoint), runtime.topology
    kept = {(topology.stage_of[node], topology.sharding(node)): own for node, own in states.items()}
    again, peak = most_besides(monkeypatch, lambda: make_states(CONFIG, topology, None, kept))
    assert again == states
    assert peak == 0
