"""Checkpoints of a small model of two stages, for the tests of all who write and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from skippipe_jax.cluster.agreement import Host, from_host_0
from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.storage.checkpoint import Checkpoint, CheckpointItems
from skippipe_jax.storage.checkpointer import Checkpointer
from skippipe_jax.storage.restore import CheckpointSearch, Parts
from tests.harness.thread_hosts import ThreadHost

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 1e-4, 100))
)


LAYERS = (1, 1)


def stage_state(seed, width=8):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": jax.random.normal(keys[0], (16, width)),
        "blocks": {"w": jax.random.normal(keys[1], (1, width, width), jnp.bfloat16)},
        "steps": jax.random.randint(keys[2], (3,), -5, 5),
    }
    floats = {"embed": params["embed"], "blocks": params["blocks"]}
    optimizer = OPTIMIZER.init(floats)
    _, optimizer = OPTIMIZER.update(floats, optimizer, floats)
    return {"params": params, "optimizer": optimizer}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding == b.sharding
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def writer_of(
    run_dir, host=None, *, layers=LAYERS, keep=3, keep_every=None, timeout_s=60.0, **options
):
    """A checkpointer, by default of a run of one host."""
    config = CheckpointConfig(1, keep, keep_every, timeout_s=timeout_s)
    run_dir.mkdir(exist_ok=True)
    return Checkpointer(
        run_dir, host or ThreadHost(), stage_layers=layers, config=config, **options
    )


def both_stages(step):
    return CheckpointItems({stage: stage_state(10 * step + stage) for stage in range(2)})


def write(run_dir, steps, **options):
    writer = writer_of(run_dir, **options)
    for step in steps:
        writer.save(step, both_stages(step), {"position": [step], "epoch": None})
    writer.close()


def damage(path: Path) -> Path:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def every_part(checkpoint: Checkpoint) -> set[str]:
    return checkpoint.record.parts()


def prepare_run(run_dir: Path, host: Host, parts: Parts = every_part, **given: Any) -> Any:
    """What a run goes on from, as all hosts find out together when it is set up."""
    search = CheckpointSearch(run_dir, host, parts, **given)
    last = search.newest()
    from_host_0(host, "cleared", lambda: search.clear(last), search.timeout_s)
    return last
