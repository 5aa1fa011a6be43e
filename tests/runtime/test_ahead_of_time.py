"""What is compiled ahead is what training and validation call then."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from skippipe_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    NetworkConfig,
    load_config,
)
from skippipe_jax.data.batches import Batch
from skippipe_jax.runtime.ahead_of_time import compile_ahead
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.training.metrics import CompilationCounter
from skippipe_jax.training.trainer import Trainer
from tests.harness.one_host import open_alone
from tests.harness.training_runs import SMALL_CASE, write_config
from tests.sched.examples import plan_of

BATCH, TIME = 2, 6
# Other shapes than anywhere else, so that nothing of it is compiled already; what stages are given
# beside their inputs, too.
CONFIG = Config(
    model=ModelConfig(width=12, layers=2, heads=2, kv_heads=1, ffn_width=20, context=TIME),
    data=DataConfig(sequence_length=TIME, microbatch_size=BATCH, packing="documents"),
    network=NetworkConfig(activation_dtype="int8", gradient_rounding="stochastic"),
)
PLAN = plan_of([[0], [1]], [[0, 1], [0, 1]])


def train(runtime: Runtime, iterations: int) -> None:
    tokens = np.ones((BATCH, TIME), np.int32)
    batch: Batch = {"tokens": tokens, "targets": tokens, "begins": tokens == 0}
    for iteration in range(iterations):
        outcome = runtime.run(iteration, {0: batch, 1: batch})
        outcome.sums()


def test_who_comes_compiles_the_stages_that_it_will_serve_and_holds_none():
    first, second = (NodeSharding((device,)) for device in jax.local_devices()[:2])
    jax.clear_caches()  # Other tests may have compiled what totals are summed by.
    gc.collect()
    before = len(jax.live_arrays())
    assert compile_ahead(CONFIG, [0], 2, [first]) == 6
    assert compile_ahead(CONFIG, [1], 2, [second]) == 5
    assert len(jax.live_arrays()) <= before
    # What remains is what draws a state, and what totals are summed by.
    with CompilationCounter() as compiled:
        runtime = open_alone(CONFIG, PLAN, devices=2)
        opened = compiled.compilations.count
        train(runtime, 2)
    assert compiled.compilations.count - opened == 2


WAYS: dict[str, dict[str, Any]] = {
    "dispatched at once": {},
    "rings in bfloat16": {
        "network": {"averaging": "ring", "averaging_dtype": "bfloat16", "mode": "emulate"},
        "recovery": {"lost_stage": "average"},
    },
    "replicas that go apart": {
        "averaging": {"mode": "outer", "every": 3, "fragments": 2, "delay": 1, "exact_steps": 1},
    },
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("dispatched at once", marks=pytest.mark.nightly),
        "rings in bfloat16",
        pytest.param("replicas that go apart", marks=pytest.mark.nightly),
    ],
)
def test_a_run_compiles_nothing_once_it_is_open(tmp_path: Path, way: str):
    """It validates, and saves checkpoints; all fragments are sent and applied."""
    # Of no other test.
    model = {"width": 20, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 28, "context": 32}
    config = write_config(
        tmp_path,
        model=model,
        run_dir=str(tmp_path / "run"),
        plan={"method": "balanced", "case": SMALL_CASE | {"forward_s": 0.001}},
        train={"steps": 6},
        validation={"every": 2, "sequences": 4},
        checkpoint={"every": 3},
        **WAYS[way],
    )
    with Trainer(load_config(config)) as trainer, CompilationCounter() as compiled:
        trainer.setup()
        assert compiled.take().count > 0
        trainer.run()
        assert compiled.compilations.count == 0
