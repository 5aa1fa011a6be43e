"""Stages whose state no host holds any more, where the run goes on without going back.

By one policy they are made anew: those who serve such a stage make its state, each for itself, from
what some members have: copies of it, or the stages beside it. From what is decided with the
generation, so all of them make the same. All others stay where they are, and the step that counted
last goes on counting. A stage is made when all members open the generation together. Until it has
contributed to a step, whoever makes one does not count as holding it: if the generation ends
before, it is made again.

By the other they are left out until one serves them again. No node moves to such a stage, and no
path visits it: its nodes are those of lost hosts, and it is back when one of these is. Whoever
serves it then has its state from the last checkpoint, where it has been kept as it was last saved:
one member reads it there and gives it to the others, as a stage is made anew. The first stage alone
has embedding and head, so it is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from skippipe_jax.config.cluster import SKIP
from skippipe_jax.consensus.apart import DATA_STAGE
from skippipe_jax.consensus.generations import Generation, Promise, Remade, Rules
from skippipe_jax.consensus.holders import Held, covers, holders_of, serving_under
from skippipe_jax.errors import RebuildImpossible


def remade(
    rules: Rules, following: Generation, held: Held, promises: Mapping[int, Promise]
) -> Generation:
    """Return the next generation, in which stages that nobody holds are made anew.

    Raises:
        RebuildImpossible: where they cannot be, or need not, because to go back costs nothing.
    """
    assert rules.remakes is not None, "the policy is to rebuild"
    members = frozenset(following.members)
    placement = rules.placed(following.placement, members, following.apart, ())
    if placement is None or not covers(rules, placement, members):
        raise RebuildImpossible("; too few hosts are left to serve all stages")
    if following.step == max(own.standing.saved for own in promises.values()):
        raise RebuildImpossible(f"; step {following.step} is saved, so nothing is lost")
    copies = {host: own.standing.copies for host, own in promises.items()}
    made = rules.remakes(held, copies, following.step)
    holders = holders_of(rules, held)
    return replace(following, placement=placement, holders=holders, remade=made)


def still_left_out(rules: Rules, last: Generation, members: Iterable[int]) -> tuple[int, ...]:
    """List the stages that stay left out, as none of these members serves them."""
    served = _served(rules, last.placement, members)
    return tuple(stage for stage in last.left_out if stage not in served)


def is_left_out_rightly(rules: Rules, generation: Generation) -> bool:
    """Tell whether a generation leaves out only stages that none of its members serves."""
    if not generation.left_out:
        return True
    served = _served(rules, generation.placement, generation.members)
    may_be = rules.leaves_out and DATA_STAGE not in generation.left_out
    return may_be and served.isdisjoint(generation.left_out)


def without_lost(rules: Rules, last: Generation, following: Generation, held: Held) -> Generation:
    """Return the next generation, which leaves out stages that nobody holds or reads them again.

    Raises:
        RebuildImpossible: where one of them cannot be left out.
    """
    lost, placement = following.lost, following.placement
    if DATA_STAGE in lost:
        why = f"; stage {DATA_STAGE} cannot be left out: it alone has embedding and head"
        raise RebuildImpossible(why)
    if not following.saved:
        raise RebuildImpossible(f"; nothing is saved yet, so stage {lost[0]} could never come back")
    members = frozenset(following.members)
    if not all(serving_under(rules, placement, members).values()):
        # Some have come beside those of the start; they serve stages that others hold.
        placement = rules.placed(placement, members, following.apart, lost)
        if placement is None:
            raise RebuildImpossible("; too few hosts are left to serve the other stages")
    served = _served(rules, placement, members)
    made = tuple(
        Remade(stage, SKIP, following.saved, (_reader(rules, following, stage),))
        for stage in lost
        if stage in served
    )
    return replace(
        following,
        placement=placement,
        holders=holders_of(rules, held),
        remade=made,
        left_out=tuple(stage for stage in lost if stage not in served),
        lost=tuple(stage for stage in lost if stage in served or stage not in last.left_out),
    )


def _reader(rules: Rules, generation: Generation, stage: int) -> int:
    """Choose who reads a stage: the first to serve it that reaches checkpoints, or the leader."""
    reaching = [
        host
        for host in generation.members
        if stage in rules.serves(generation.placement, host) and host not in generation.apart
    ]
    return min(reaching, default=generation.leader)


def _served(rules: Rules, placement: Any, hosts: Iterable[int]) -> frozenset[int]:
    return frozenset[int]().union(*serving_under(rules, placement, hosts).values())
