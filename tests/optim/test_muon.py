"""The update by Muon against the one of Optax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.config.parsing import parse_config
from skippipe_jax.models.footprint import block_matrices, optimizer_bytes, stage_parameters
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.optim.muon import UPDATE_RMS, labels
from skippipe_jax.optim.update_rule import learning_rate_schedule, update_rule, updates_made

MODEL = ModelConfig(width=8, layers=4, heads=2, kv_heads=1, ffn_width=12, vocabulary_size=20)
CONFIG = OptimizerConfig(name="muon", learning_rate=0.1, warmup_steps=1, weight_decay=0.3)
STEPS = 6


def drawn(seed: int) -> Any:
    """Parameters of a data stage, or gradients of them."""
    shapes = stage_shapes(MODEL, 2)[0]
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return structure.unflatten(
        [jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    )


def test_matrices_are_updated_as_by_optax_and_all_else_as_by_adamw():
    expected = optax.contrib.muon(
        learning_rate_schedule(CONFIG, STEPS),
        consistent_rms=UPDATE_RMS,
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2),
    )
    rule = update_rule(replace(CONFIG, weight_decay=0.0), STEPS)
    adamw = update_rule(replace(CONFIG, weight_decay=0.0, name="adamw"), STEPS)
    parameters = drawn(0)
    matrix = parameters["blocks"]["up"]["kernel"]
    state, plain_state = rule.init(parameters), adamw.init(parameters)
    of_optax = expected.init({"up": matrix})
    for step in range(3):
        gradients = drawn(1 + step)
        own: Any
        plain: Any
        theirs: Any
        own, state = rule.update(gradients, state, parameters)
        plain, plain_state = adamw.update(gradients, plain_state, parameters)
        given = {"up": gradients["blocks"]["up"]["kernel"]}
        theirs, of_optax = expected.update(given, of_optax, {"up": matrix})
        found = own["blocks"]["up"]["kernel"]
        np.testing.assert_allclose(found, theirs["up"], rtol=2e-5, atol=1e-6)
        for name in ("embedding", "final_norm"):
            jax.tree.map(np.testing.assert_array_equal, own[name], plain[name])
    assert updates_made(state) == 3


def test_only_matrices_of_blocks_are_updated_by_it():
    found = labels(drawn(0))
    assert {found["blocks"][name]["kernel"] for name in ("query", "output", "up", "down")} == {
        "muon"
    }
    assert {*jax.tree.leaves({**found, "blocks": {}})} == {"adamw"}
    assert found["blocks"]["attention_norm"]["scale"] == "adamw"


def test_a_skipped_update_leaves_the_state_as_it_was():
    parameters, rule = drawn(0), update_rule(CONFIG, STEPS)
    _, state = rule.update(drawn(1), rule.init(parameters), parameters)
    _, after = rule.update(drawn(2), state, parameters, is_skipped=True)
    jax.tree.map(np.testing.assert_array_equal, state, after)
    assert updates_made(after) == 1


@pytest.mark.parametrize("is_data_stage", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_formula_counts_what_the_optimizer_keeps(name: str, is_data_stage: bool):
    config = parse_config({"optimizer": {"name": name}, "model": {"width": 8, "layers": 4}})
    model, layers = config.model, 2
    shapes = stage_shapes(model, 2)[0 if is_data_stage else 1]
    state = jax.eval_shape(update_rule(config.optimizer, STEPS).init, shapes)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    count = stage_parameters(model, layers, is_data_stage=is_data_stage)
    assert held == optimizer_bytes(config, count, block_matrices(model, layers))


def test_its_momentum_says_nothing_to_adamw():
    with pytest.raises(InputError, match=r"has no effect with optimizer\.name: adamw"):
        OptimizerConfig(muon_momentum=0.9)
