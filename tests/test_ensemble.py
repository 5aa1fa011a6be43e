"""Mixtures of one float per token, against plain loops in float64, and what must hold of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.ensemble import cached_log_prior, target_log_weights, weighed
from tests.harness import ensemble_by_hand as by_hand

CLOSE = {"rtol": 0, "atol": 1e-9}


def mix(log_p: np.ndarray, resets: np.ndarray, **how: Any) -> np.ndarray:
    return weighed(log_p, target_log_weights(log_p, resets, **how))


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


@pytest.mark.parametrize(
    "asked", [{"prior": "best"}, {"how": "best"}, {"prior": "cached"}], ids=str
)
def test_what_is_no_prior_and_no_way_is_refused(asked: dict[str, Any]):
    with pytest.raises(InputError):
        mix(*drawn(2, 1, 3, -1.0, 0.0), **asked)
