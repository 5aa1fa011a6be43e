"""What replicas that go apart do when hosts are lost or come while a fragment is under way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skippipe_jax.config import AveragingConfig, Config, DataConfig, TrainConfig
from skippipe_jax.optim.outer import begin, fragments_of
from skippipe_jax.runtime.outer_steps import settle_fragments
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.state import MOMENTUM, FragmentInTransit, StageState
from tests.runtime.test_oracle import BATCH, SMALL, TIME

LAYERS, SENT_AFTER = 2, 4
CONFIG = Config(
    model=replace(SMALL, layers=2 * LAYERS),
    data=DataConfig(microbatch_size=BATCH, sequence_length=TIME),
    averaging=AveragingConfig(mode="outer", every=4, fragments=2, delay=2, dtype="int8"),
    train=TrainConfig(8),
)


def trained(seed: int) -> StageState:
    """A replica of the last stage that has gone apart from the others, and has a residual."""
    functions = functions_of_run(CONFIG, 2)[1]
    created = functions.create(jax.random.key(0), LAYERS)
    state = StageState(functions, *created, draw=np.array([0, LAYERS], np.uint32))
    state.outer = begin(state.parameters)
    random = np.random.default_rng(seed)
    for name in ("parameters", "residual"):
        owner: Any = state if name == "parameters" else state.outer
        moved = jax.tree.map(
            lambda leaf: leaf + jnp.asarray(random.normal(0, 0.01, leaf.shape), jnp.float32),
            getattr(owner, name),
        )
        object.__setattr__(owner, name, moved)
    return state


def sent(state: StageState, committed_with: int = SENT_AFTER) -> FragmentInTransit:
    """Its second fragment, as it sends it."""
    assert state.outer is not None
    fragment = fragments_of(CONFIG.averaging, LAYERS)[1]
    message, part, state.outer = fragment.send(state.parameters, state.outer)
    state.under_way[SENT_AFTER] = FragmentInTransit(1, part, message, committed_with)
    return state.under_way[SENT_AFTER]


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("committed_with", [SENT_AFTER, SENT_AFTER + 1])
def test_what_counts_is_applied_alike_by_all_and_what_does_not_is_as_if_never_sent(
    committed_with: int,
):
    """What was under way when a run was resumed counts with the step after that."""
    replicas = [trained(seed) for seed in (1, 2)]
    before = [jax.tree.map(jnp.copy, (own.parameters, own.outer)) for own in replicas]
    under_way = [sent(own, committed_with) for own in replicas]
    # One has all messages, the other has none yet: nobody may apply them.
    under_way[0].messages = dict(enumerate(own.message for own in under_way))
    for own, (parameters, outer) in zip(replicas, before, strict=True):
        settle_fragments(CONFIG, LAYERS, own, committed_with - 1)
        assert not own.under_way
        assert_same(own.parameters, parameters)
        assert own.outer is not None
        assert_same((own.outer.anchor, own.outer.momentum), (outer.anchor, outer.momentum))
        jax.tree.map(
            lambda found, was: np.testing.assert_allclose(found, was, atol=1e-7),
            own.outer.residual,
            outer.residual,
        )
    under_way = [sent(own, committed_with) for own in replicas]
    for own in under_way:
        own.messages = {1: under_way[1].message, 0: under_way[0].message}
    # One of the two is a step ahead.
    for own, step in zip(replicas, (committed_with, committed_with + 1), strict=True):
        settle_fragments(CONFIG, LAYERS, own, step)
    first, second = (own.outer for own in replicas)
    assert first is not None
    assert second is not None
    assert_same((first.anchor, first.momentum), (second.anchor, second.momentum))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), first.anchor, before[0][1].anchor)
    assert any(jax.tree.leaves(moved))


def test_who_comes_is_given_the_outer_parameters_and_momentum():
    state = trained(3)
    own = sent(state)
    own.messages = {0: own.message}
    settle_fragments(CONFIG, LAYERS, state, SENT_AFTER)
    assert state.outer is not None
    given = state.to_give(with_momentum=True)
    assert_same(given["parameters"], state.outer.anchor)
    assert_same(given[MOMENTUM], state.outer.momentum)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(given[MOMENTUM]))
    # A replica that was the only one of its stage has no momentum, and gives its parameters.
    state.outer = None
    given = state.to_give(with_momentum=True)
    assert_same(given["parameters"], state.parameters)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(given[MOMENTUM]))
    assert MOMENTUM not in state.to_give(with_momentum=False)
