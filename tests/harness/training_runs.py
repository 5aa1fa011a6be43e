"""Small runs for tests: their configuration, how they are started, and what they leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from skippipe_jax import Run
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.state import shapes_of_state
from skippipe_jax.storage.arrays import describe_arrays, read_arrays
from skippipe_jax.storage.checkpoint import open_checkpoint
from skippipe_jax.storage.loading import load_stage
from skippipe_jax.storage.run_dir import METRICS, RunDir
from skippipe_jax.training.trainer import Trainer

Arrays = dict[str, np.ndarray]

# Two stages, the second on two nodes.
SMALL_CASE = {
    "nodes": 3,
    "locations": ["Belgium", "Iowa"],
    "links": "gcp12",
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "stages": [1, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}
# Two blocks a stage: stages of other runs with as many blocks share what is compiled.
MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
# Steps so large that parameters which differ a little soon lead elsewhere. Runs of any length share
# what is compiled, as the schedule does not depend on their length.
OPTIMIZER = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "decay_steps": 100,
    "weight_decay": 0.1,
}


def write_config(folder: Path, **sections: Any) -> Path:
    """A config file in `folder`; `sections` replace those that all tests have in common."""
    text = np.random.default_rng(0).choice(list(b"skipping pipeline stages \n"), 40_000)
    (folder / "text").write_bytes(bytes(text.tolist()))
    config = {
        "compilation_cache": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "model": MODEL,
        "data": {
            "source": "text",
            "path": str(folder / "text"),
            "sequence_length": 32,
            "microbatch_size": 2,
        },
        "optimizer": OPTIMIZER,
        "cluster": {"heartbeat_timeout_s": 20, "connect_timeout_s": 120},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


def settings(**values: Any) -> list[str]:
    """Arguments that override keys, written with two underscores for the dot between."""
    words = (f"{key.replace('__', '.')}={value}" for key, value in values.items())
    return [word for setting in words for word in ("--set", setting)]


def train_alone(config: Config, *, resume: bool = False) -> None:
    """Train as the only host, with the compilation cache of the tests."""
    Trainer(config, host=Membership(config.cluster, 0, 1), resume=resume).run()


def virtual_devices(count: int) -> dict[str, str]:
    """The environment of a process that has so many devices."""
    # The last of two flags counts.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    return {"XLA_FLAGS": flags}


def steps_done(run_dir: Path) -> int:
    """The last step that a run has reported."""
    return RunDir(run_dir).last_step() if (run_dir / METRICS).exists() else 0


def arrays_of_checkpoint(run_dir: Path, step: int) -> list[Arrays]:
    """Parameters and optimizer state of every stage."""
    config, plan = RunDir(run_dir).config(), RunDir(run_dir).plan()
    checkpoint = open_checkpoint(run_dir, step)
    cut = config.model.stage_partition(len(plan.stages))
    return [
        by_name(load_stage(checkpoint, cut, stage, shapes_of_state(functions)))
        for stage, functions in enumerate(functions_of_run(config, len(plan.stages)))
    ]


def assert_same_run(run_dir: Path, expected: Path, steps: int) -> None:
    """Two runs have trained through the same steps, to the same bits."""
    for arrays, others in zip(
        arrays_of_checkpoint(run_dir, steps), arrays_of_checkpoint(expected, steps), strict=True
    ):
        assert_same_bits(arrays, others)
    found, told = (
        [(line["step"], line["loss"], line["learning_rate"]) for line in Run(each).metrics]
        for each in (run_dir, expected)
    )
    assert found == told
    assert [step for step, *_ in found] == list(range(1, steps + 1))


def arrays_in(folder: Path) -> Arrays:
    """All arrays that a folder of a checkpoint holds."""
    shapes = describe_arrays(folder).items()
    wanted = {k: jax.ShapeDtypeStruct(own.shape, own.dtype) for k, own in shapes}
    found = read_arrays(folder, wanted)
    return {name: np.asarray(array) for name, array in found.items()}


def by_name(tree: Any) -> Arrays:
    """The leaves of a tree by their path, such as "parameters/blocks/key/kernel"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_same_bits(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name
