"""Hosts that were told to leave: when they go, and when their going is the end of the run.

A notice of preemption may come to one host or to all of them, and not at one moment. So a host goes
only when its notice is some beats old, at the end of a step. If by then so many were told that the
rest could not go on, none of them goes, and the run ends.
"""

from __future__ import annotations

from skippipe_jax.consensus.generations import State
from skippipe_jax.consensus.holders import covering

ENOUGH = 4
"""So often a host that was told to leave has to be heard of before the others do without it."""


def going(state: State) -> frozenset[int]:
    """List those that the next generation does without, once others hold what they do."""
    if is_the_end(state):
        return frozenset()
    return frozenset(host for host in _told(state) if state.leaving[host] >= ENOUGH)


def is_the_end(state: State) -> bool:
    """Tell whether so many are told to leave that the run has to end."""
    told = _told(state)
    if not told or state.generation is None:
        return False
    staying = frozenset(state.members) - told
    apart = {*state.generation.apart, *state.textless}
    most_go = 2 * len(told) > len(state.members)
    # Those that are apart could not save what they train.
    if most_go or staying <= {*state.generation.apart}:
        return True
    left_out = state.generation.left_out
    return covering(state.rules, state.generation.placement, staying, apart, left_out) is None


def _told(state: State) -> frozenset[int]:
    return frozenset(state.leaving) & frozenset(state.members)
