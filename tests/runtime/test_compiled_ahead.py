"""What is compiled ahead, without any state, is what training calls then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from skippipe_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    NetworkConfig,
)
from skippipe_jax.data.batches import Batch
from skippipe_jax.runtime.compiled_ahead import compile_ahead
from skippipe_jax.runtime.spread import single
from skippipe_jax.runtime.stage_functions import functions_of_run
from tests.one_host import open_alone
from tests.sched.examples import plan_of

BATCH, TIME = 2, 6
# Other shapes than anywhere else, so that nothing of it is compiled already; what stages are given
# beside their inputs, too.
CONFIG = Config(
    model=ModelConfig(width=12, layers=2, heads=2, kv_heads=1, ffn_width=20, context=TIME),
    data=DataConfig(sequence_length=TIME, microbatch_size=BATCH, packing="documents"),
    network=NetworkConfig(activation_dtype="int8", gradient_rounding="stochastic"),
)
FUNCTIONS = ("forward", "backward", "loss", "zero_gradients", "squared_norm", "update")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A folder of its own for what is compiled."""
    name = "jax_compilation_cache_dir"
    before = getattr(jax.config, name)
    jax.config.update(name, str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update(name, before)
    compilation_cache.reset_cache()


def compiled(cache: Path) -> set[str]:
    """The stage functions in the cache."""
    names = {path.name for path in cache.iterdir()}
    return {name for name in names if name.startswith(tuple(f"jit_{own}-" for own in FUNCTIONS))}


def traces_of_all() -> list[int]:
    """How often each stage function has been called with other arguments than before."""
    jitted: list[Any] = [
        getattr(functions, field.name)
        for functions in functions_of_run(CONFIG, 2)
        for field in dataclasses.fields(functions)
        # Whoever begins without a state draws one; what is no function is never called.
        if field.name not in ("create", "begin", "state_memory", "on")
    ]
    return [function._cache_size() for function in jitted]


def test_training_compiles_no_stage_function_that_was_compiled_ahead(cache: Path):
    plan = plan_of([[0], [1]], [[0, 1], [0, 1]])
    first, second = map(single, jax.local_devices()[:2])
    assert compile_ahead(CONFIG, [0], 2, [first]) == 6
    assert compile_ahead(CONFIG, [1], 2, [second]) == 5
    before = compiled(cache)
    traced = traces_of_all()
    assert len(before) >= 7, "what both stages have alike stands there once"
    runtime = open_alone(CONFIG, plan, devices=2)
    tokens = np.ones((BATCH, TIME), np.int32)
    batch: Batch = {"tokens": tokens, "targets": tokens, "begins": tokens == 0}
    runtime.run(0, {0: batch, 1: batch})
    runtime.run(1, {0: batch, 1: batch})
    assert compiled(cache) == before
    assert traces_of_all() == traced, "nor is any traced again"
