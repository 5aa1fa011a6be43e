"""Two real processes write one checkpoint; run as a program, this file is one of them."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed

from skippipe_jax.storage.checkpoint import (
    CheckpointItems,
    committed_steps,
    latest_step,
    open_checkpoint,
)
from skippipe_jax.storage.checkpointer import Checkpointer, RetentionPolicy
from skippipe_jax.storage.loading import load_data_state, load_stage
from tests.multihost.processes import started_processes
from tests.ports import free_port
from tests.storage.checkpoints import prepare_run
from tests.thread_hosts import ThreadHost

STEPS = [2, 4, 6, 8]


class ProcessHost:
    """A process of jax.distributed, whose coordinator keeps what hosts tell one another."""

    def __init__(self):
        self.index = jax.process_index()
        self.count = jax.process_count()
        client = distributed.global_state.client
        assert client is not None
        self._client = client

    def put(self, key, value):
        self._client.key_value_set(key, value)

    def get(self, key, timeout_s, source=None):
        return self._client.blocking_key_value_get(key, int(timeout_s * 1000))


@jax.jit
def make_state(step, stage):
    weights = jnp.arange(2**20, dtype=jnp.float32).reshape(1024, 1024)
    half = jnp.full((33,), step + stage, jnp.bfloat16)
    return {"params": {"w": weights + 1000 * step + stage, "b": half}, "optimizer": {"n": step}}


def run_host(index, port, run_dir):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    host = ProcessHost()
    assert prepare_run(run_dir, host, timeout_s=60) is None

    other = 1 - index
    advance = jax.jit(lambda old: make_state(old["optimizer"]["n"] + 2, index), donate_argnums=0)
    writer = Checkpointer(
        run_dir, host, stage_layers=(1, 1, 1), policy=RetentionPolicy(2), timeout_s=60
    )
    state = make_state(STEPS[0], index)
    for step in STEPS:
        # Both processes save at once; one of them has two stages.
        stages = {0: state} if index == 0 else {1: state, 2: make_state(step, 2)}
        writer.save(step, CheckpointItems(stages), {"at": step} if index == 0 else None)
        state = advance(state)
    writer.wait()
    assert latest_step(run_dir) == STEPS[-1]

    device = jax.local_devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    checkpoint = open_checkpoint(run_dir)
    for stage in (index, other, 2):
        expected = make_state(STEPS[-1], stage)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), expected
        )
        found = load_stage(checkpoint, (1, 1, 1), stage, shapes)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(found))
    assert load_data_state(checkpoint) == {"at": STEPS[-1]}
    writer.close()

    # Saves of one process must not meet those of another that happen to run at the same time.
    writer = Checkpointer(
        run_dir / str(index), ThreadHost(), stage_layers=(1,), policy=RetentionPolicy(1)
    )
    for step in range(60):
        writer.save(step, CheckpointItems({0: {"step": jnp.int32(step)}}), {})
    writer.close()


def test_two_processes_write_and_read_one_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / "00000004" / "stage_0").mkdir(parents=True)  # left by a crash
    port = str(free_port())
    with started_processes(tmp_path / "hosts") as processes:
        for index in range(2):
            processes.start(__file__, str(index), port, tmp_path)
        assert processes.exit_codes(120.0) == [0, 0], processes.outputs()
    assert committed_steps(tmp_path) == STEPS[-2:]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


if __name__ == "__main__":
    run_host(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
