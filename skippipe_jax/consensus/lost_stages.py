"""Recovery of lost stages, whose state no host holds any more, without a rollback.

One kind of policy rebuilds them (`buddy`, `average`). Every host that serves such a stage makes its
state from data of some members: copies of the stage, or its neighbor stages. The sources are
decided with the generation, so all hosts make the same state. All other stages keep their states,
and the last committed step stays committed. Stages are rebuilt when all members enter the
generation. A host counts as holding a rebuilt stage once it has contributed to a step; if the
generation ends before, the stage is rebuilt again.

The other policy (`skip`) leaves them out until a host serves them again. No node moves to such a
stage, and no path visits it: its nodes belong to lost hosts, and it returns with one of these. Its
state is then the one of the last checkpoint, to which it was carried over from its last save. One
member reads it and sends it to the others, as for a rebuilt stage. Only the first stage has the
embedding and the head, so it is never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from skippipe_jax.config.cluster import SKIP
from skippipe_jax.consensus.diskless import DATA_STAGE
from skippipe_jax.consensus.generations import Generation, Promise, RebuiltStage, Rules
from skippipe_jax.consensus.holders import Held, covers, holders_of, serving_under
from skippipe_jax.errors import RebuildImpossible


def remade(
    rules: Rules, following: Generation, held: Held, promises: Mapping[int, Promise]
) -> Generation:
    """Return the next generation with its lost stages rebuilt.

    Raises:
        RebuildImpossible: if they cannot be rebuilt, or a rollback would lose no step.
    """
    assert rules.remakes is not None, "the policy is to rebuild"
    members = frozenset(following.members)
    placement = rules.placed(following.placement, members, following.apart, ())
    if placement is None or not covers(rules, placement, members):
        raise RebuildImpossible("; too few hosts remain to serve all stages")
    if following.step == max(own.standing.saved for own in promises.values()):
        raise RebuildImpossible(
            f"; step {following.step} has a checkpoint, so a rollback loses no step"
        )
    copies = {host: own.standing.copies for host, own in promises.items()}
    made = rules.remakes(held, copies, following.step)
    holders = holders_of(rules, held)
    return replace(following, placement=placement, holders=holders, remade=made)


def still_left_out(rules: Rules, last: Generation, members: Iterable[int]) -> tuple[int, ...]:
    """Return the stages that stay left out, as none of these members serves them."""
    served = _served(rules, last.placement, members)
    return tuple(stage for stage in last.left_out if stage not in served)


def is_valid_bypass(rules: Rules, generation: Generation) -> bool:
    """Return True if a generation leaves out only stages that it may, and no member serves."""
    if not generation.left_out:
        return True
    served = _served(rules, generation.placement, generation.members)
    may_be = rules.leaves_out and DATA_STAGE not in generation.left_out
    return may_be and served.isdisjoint(generation.left_out)


def without_lost(rules: Rules, last: Generation, following: Generation, held: Held) -> Generation:
    """Return the next generation, with lost stages left out, or restored if a member serves them.

    Raises:
        RebuildImpossible: if a lost stage cannot be left out.
    """
    lost, placement = following.lost, following.placement
    if DATA_STAGE in lost:
        why = f"; stage {DATA_STAGE} cannot be bypassed: only it has embedding and head"
        raise RebuildImpossible(why)
    if not following.saved:
        raise RebuildImpossible(f"; no checkpoint exists to restore stage {lost[0]} from later")
    members = frozenset(following.members)
    if not all(serving_under(rules, placement, members).values()):
        # Extra hosts serve no stage under this placement; they get stages that others hold.
        placement = rules.placed(placement, members, following.apart, lost)
        if placement is None:
            raise RebuildImpossible("; too few hosts remain to serve the other stages")
    served = _served(rules, placement, members)
    made = tuple(
        RebuiltStage(stage, SKIP, following.saved, (_reader(rules, following, stage),))
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
    """Choose the reader of a stage: its first host that is not apart, else the leader."""
    reaching = [
        host
        for host in generation.members
        if stage in rules.serves(generation.placement, host) and host not in generation.apart
    ]
    return min(reaching, default=generation.leader)


def _served(rules: Rules, placement: Any, hosts: Iterable[int]) -> frozenset[int]:
    return frozenset[int]().union(*serving_under(rules, placement, hosts).values())
