"""Mixtures of one float per token, against plain loops in float64, and what must hold of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError

from skippipe_jax.ensemble import priors
from skippipe_jax.ensemble.mixing import cached_log_prior, mix, weights
from skippipe_jax.ensemble.mixtures import arithmetic
from skippipe_jax.ensemble.posterior import final_log_weights, likeliest, log_weights
from tests.ensemble import by_hand

CLOSE = {"rtol": 0, "atol": 1e-9}


def drawn(
    experts: int, sequences: int, positions: int, least: float, often: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities down to `least`, some targets that do not count, resets as `often`."""
    random = np.random.default_rng(seed)
    log_p = random.uniform(least, 0, (experts, sequences, positions)).astype(np.float32)
    log_p[:, random.random((sequences, positions)) < 0.1] = 0
    return log_p, random.random((sequences, positions)) < often


@pytest.mark.parametrize("how", ["posterior", "prior", "top-1"])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 4, 50, -3.0, 0.1),
        (2, 1, 3000, -0.1, 0.0),
        (5, 2, 1500, -80.0, 0.01),
        (4, 5, 40, -20.0, 0.8),
        (1, 2, 9, -2.0, 0.3),
    ],
    ids=["short", "long", "extreme", "many resets", "alone"],
)
def test_losses_are_those_of_the_formulas(shape: tuple, how: str):
    log_p, resets = drawn(*shape)
    wide, experts, sequences = log_p.astype(np.float64), *shape[:2]
    cached = np.random.default_rng(1).dirichlet(np.ones(experts))
    of_sequences = {
        "uniform": np.full((sequences, experts), 1 / experts),
        "cached": np.tile(cached, (sequences, 1)),
        "decay": by_hand.priors_of(wide, resets, 0.3),
    }
    for prior, expected in of_sequences.items():
        # It need not be normalised.
        given: dict[str, Any] = {"log_prior": np.log(cached) + 3} if prior == "cached" else {}
        found = mix(log_p, resets, prior=prior, how=how, **given)
        assert found.dtype == np.float64
        # A millionth of a nat is what is asked for.
        np.testing.assert_allclose(found, by_hand.mixed(wide, resets, expected, how), **CLOSE)


def test_the_cached_prior_is_that_after_a_part_of_its_own():
    log_p, resets = drawn(3, 20, 12, -1.0, 0.1)
    found = cached_log_prior(log_p, resets, decay=0.8)
    expected = by_hand.priors_of(log_p.astype(np.float64), resets, 0.8)[-1]
    np.testing.assert_allclose(np.exp(found), expected, **CLOSE)
    assert expected.sum() == pytest.approx(1)


def test_no_prior_is_ever_so_small_that_its_expert_cannot_come_back():
    """A thousand sequences of one expert, and then one of the other."""
    log_p = np.full((2, 1001, 8), -1.0)
    log_p[1, :1000], log_p[0, 1000] = -90.0, -400.0
    found = mix(log_p, np.zeros(log_p.shape[1:], bool), prior="decay")
    assert np.isfinite(found).all()
    assert found[1000, -1] == pytest.approx(-1.0)


def test_the_functions_work_in_what_they_are_given():
    log_p, resets = drawn(3, 2, 30, -4.0, 0.1)
    prior = priors.uniform_prior(3)
    log_w = log_weights(jnp.asarray(log_p), prior, jnp.asarray(resets))
    assert log_w.dtype == jnp.float32
    np.testing.assert_allclose(log_w, weights(log_p, resets), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.exp(log_w).sum(axis=0), 1, rtol=1e-5)
    final = final_log_weights(jnp.asarray(log_p), prior, jnp.asarray(resets))
    by_place = [by_hand.posteriors(log_p[:, i], np.full(3, 1 / 3), resets[i]) for i in range(2)]
    np.testing.assert_allclose(jnp.exp(final).T, [found[-1] for found in by_place], rtol=1e-4)


SEEDS = st.integers(0, 2**32 - 1)
# One shape, so that few programs are compiled.
SHAPE = (3, 4, 16)


@st.composite
def scored(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    least = draw(st.sampled_from([-0.01, -2.0, -80.0]))
    return drawn(*SHAPE, least, draw(st.sampled_from([0.0, 0.1, 0.7])), draw(SEEDS))


HOW = st.sampled_from(["posterior", "prior", "top-1"])


@given(scored(), HOW, st.integers(1, SHAPE[2] - 1), SEEDS)
@settings(max_examples=20)
def test_a_reset_forgets(both: tuple, how: str, place: int, seed: int):
    log_p, resets = both
    resets[:, place] = True
    other = log_p.copy()
    other[:, :, :place] = drawn(*SHAPE, -5.0, 0.0, seed)[0][:, :, :place]
    found, again = (mix(one, resets, how=how)[:, place:] for one in (log_p, other))
    np.testing.assert_array_equal(found, again)


@given(scored(), HOW, st.integers(1, SHAPE[1] - 1), SEEDS)
@settings(max_examples=20)
def test_a_decayed_prior_is_of_the_past_alone(both: tuple, how: str, first: int, seed: int):
    log_p, resets = both
    other = log_p.copy()
    other[:, first:] = drawn(*SHAPE, -5.0, 0.0, seed)[0][:, first:]
    both = log_p, other
    found, again = (mix(one, resets, prior="decay", how=how)[:first] for one in both)
    np.testing.assert_array_equal(found, again)
    # Nor is the posterior of a token of what comes after it.
    found, again = (weights(one, resets, prior="decay")[:, first, 0] for one in both)
    np.testing.assert_array_equal(found, again)


@given(st.sampled_from([0.1, 3.0, 60.0]), SEEDS)
@settings(max_examples=20)
def test_a_mixture_is_a_distribution(spread: float, seed: int):
    """Every possible target is tried, of two sequences of 3 positions and 7 tokens."""
    random = np.random.default_rng(seed)
    logits = random.normal(scale=spread, size=(3, 2, 3, 7))
    log_p = jnp.asarray(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    log_w = jnp.log(jnp.asarray(random.dirichlet(np.ones(3), (2, 3)).transpose(2, 0, 1)))
    for own in (log_w, likeliest(log_w)):
        found = arithmetic(log_p, own[..., None])
        np.testing.assert_allclose(jnp.exp(found).sum(axis=-1), 1, rtol=1e-4)
    one_by_one = [arithmetic(log_p[..., token], log_w) for token in range(7)]
    np.testing.assert_allclose(
        jnp.stack(one_by_one, axis=-1), arithmetic(log_p, log_w[..., None]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "asked", [{"prior": "best"}, {"how": "best"}, {"prior": "cached"}], ids=str
)
def test_what_is_no_prior_and_no_way_is_refused(asked: dict[str, Any]):
    with pytest.raises(InputError):
        mix(*drawn(2, 1, 3, -1.0, 0.0), **asked)
