"""Stages that nobody holds any more, without which the run goes on until one serves them again.

No node moves to such a stage, and no path visits it: its nodes are those of lost hosts, and it is
back when one of these is. Whoever serves it then has its state from the last checkpoint, where it
has been kept as it was last saved: one member reads it there and gives it to the others, as a stage
is made anew. The first stage alone has embedding and head, so it is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from skippipe_jax.config.recovery import SKIP
from skippipe_jax.consensus.apart import DATA_STAGE
from skippipe_jax.consensus.generations import Generation, Remade, Rules
from skippipe_jax.consensus.holders import Held, holders_of
from skippipe_jax.errors import RebuildImpossible


def still_left_out(rules: Rules, last: Generation, members: Iterable[int]) -> tuple[int, ...]:
    """List the stages that stay left out, as none of these members serves them."""
    served = _served(rules, last.placement, members)
    return tuple(stage for stage in last.left_out if stage not in served)


def is_left_out_rightly(rules: Rules, generation: Generation) -> bool:
    """Tell whether a generation leaves out only stages that none of its members serves."""
    if not generation.left_out:
        return True
    served = _served(rules, generation.placement, generation.members)
    may_be = rules.placed_without is not None and DATA_STAGE not in generation.left_out
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
    if rules.placed_without is not None and not all(
        rules.serves(placement, host) for host in members
    ):
        # Some have come beside those of the start; they serve stages that others hold.
        placement = rules.placed_without(placement, members, following.apart, lost)
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
        holders=holders_of(rules, placement, held),
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
    return frozenset[int]().union(*(rules.serves(placement, host) for host in hosts))
