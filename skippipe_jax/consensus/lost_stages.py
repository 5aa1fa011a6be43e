"""Stages whose state no host holds any more, where the run goes on without going back.

Those who serve such a stage make its state anew, each for itself, from what some members have:
copies of it, or the stages beside it. From what is decided with the generation, so all of them make
the same. All others stay where they are, and the step that counted last goes on counting.

A stage is made when all members open the generation together. Until it has contributed to a step,
whoever makes one does not count as holding it: if the generation ends before, it is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from skippipe_jax.consensus.generations import Generation, Promise, Rules
from skippipe_jax.consensus.holders import Held, holders_of
from skippipe_jax.errors import RebuildImpossible


def lost(rules: Rules, last: Generation, held: Held) -> tuple[int, ...]:
    """List the stages whose state nobody holds."""
    return tuple(
        stage
        for stage, holding in enumerate(holders_of(rules, last.placement, held))
        if not holding
    )


def remade(
    rules: Rules, following: Generation, held: Held, promises: Mapping[int, Promise]
) -> Generation:
    """Return the next generation, in which stages that nobody holds are made anew.

    Raises:
        RebuildImpossible: where they cannot be, or need not, because to go back costs nothing.
    """
    assert rules.remakes is not None, "the policy is to rebuild"
    members = frozenset(following.members)
    placement = rules.placed(following.placement, members, following.apart)
    if placement is None or not rules.covers(placement, members):
        raise RebuildImpossible("; too few hosts are left to serve all stages")
    if following.step == max(own.standing.saved for own in promises.values()):
        raise RebuildImpossible(f"; step {following.step} is saved, so nothing is lost")
    copies = {host: own.standing.copies for host, own in promises.items()}
    made = rules.remakes(held, copies, following.step)
    holders = holders_of(rules, placement, held)
    return replace(following, placement=placement, holders=holders, remade=made)
