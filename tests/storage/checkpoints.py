"""Checkpoints of a small model of two stages, for the tests of all who write and read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from skippipe_jax.storage.writer import CheckpointWriter
from tests.thread_hosts import ThreadHost

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


def write(run_dir, steps, keep=3, **options):
    writer = CheckpointWriter(run_dir, ThreadHost(), stage_layers=LAYERS, keep=keep, **options)
    for step in steps:
        data = {"position": [step], "epoch": None}
        writer.save(step, {i: stage_state(10 * step + i) for i in range(2)}, data)
    writer.close()
