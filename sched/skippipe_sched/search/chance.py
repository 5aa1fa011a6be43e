"""Random numbers of compiled code: a stream for each chain, the same on every machine."""

from __future__ import annotations

import numpy as np

from skippipe_sched.search.compiled import compiled


def random_state(seed: int) -> np.ndarray:
    """The state of the random numbers of one chain."""
    return np.array([seed % 2**64], np.uint64)


@compiled
def uniform(state):
    """A number in [0, 1): splitmix64."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def below(state, number):
    """A whole number from 0 to below `number`."""
    return int(uniform(state) * number)
