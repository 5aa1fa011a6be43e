"""Construction of the next generation, once enough members of the last one have promised.

A host may be asked to leave. Preemption notices may reach one host or all of them, at different
times. So a host leaves only when its notice is some beats old, after a committed step. If by then
so many hosts were asked to leave that the rest could not continue, none of them leaves, and the run
ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from skippipe_jax.consensus import lost_stages
from skippipe_jax.consensus.diskless import apart_of, leader_of, reading_without_text
from skippipe_jax.consensus.generations import Generation, Promise, State
from skippipe_jax.consensus.holders import (
    chosen,
    covering,
    held_after,
    holders_of,
    lost,
    serving_under,
)
from skippipe_jax.errors import RebuildImpossible

BEATS_BEFORE_LEAVING = 4
"""Beats with its notice that a leaving host has to send before the others continue without it."""


def going(state: State) -> frozenset[int]:
    """Return the members that leave, once others hold the states of their stages."""
    if is_the_end(state):
        return frozenset()
    return frozenset(
        host for host in _asked_to_leave(state) if state.leaving[host] >= BEATS_BEFORE_LEAVING
    )


def is_the_end(state: State) -> bool:
    """Return True if so many members were asked to leave that the run has to end."""
    asked = _asked_to_leave(state)
    if not asked or state.generation is None:
        return False
    staying = frozenset(state.members) - asked
    apart = {*state.generation.apart, *state.textless}
    most_leave = 2 * len(asked) > len(state.members)
    # Members that are apart could not save checkpoints.
    if most_leave or staying <= {*state.generation.apart}:
        return True
    left_out = state.generation.left_out
    return covering(state.rules, state.generation.placement, staying, apart, left_out) is None


def _asked_to_leave(state: State) -> frozenset[int]:
    return frozenset(state.leaving) & frozenset(state.members)


def next_generation(state: State, promises: Mapping[int, Promise]) -> Generation:
    """Return the generation of the hosts that have promised and of those that wait to join.

    If a stage is lost, it is rebuilt or left out, or all members go back to the last checkpoint,
    or the run ends.
    """
    last, rules = state.generation, state.rules
    assert last is not None, "a member's"
    before = last.placement
    promised = frozenset(promises)
    new = {host: process for host, process in state.joining.items() if host not in promised}
    furthest = max((own.standing for own in promises.values()), key=lambda own: own.applied)
    held = held_after(rules, last, {host: own.standing for host, own in promises.items()})
    wish = state.wish if state.wish is not None and state.wish.number == last.number else None
    leaving = going(state)
    everybody = promised | new.keys()
    apart = apart_of(state, sorted(everybody), new)
    without_text = state.textless & everybody
    if reading := reading_without_text(state, everybody, last.placement):
        last = replace(last, placement=rules.without_text(last.placement, reading), plan="")
    unreading = {*apart, *without_text}
    left_out = lost_stages.still_left_out(rules, last, everybody)
    choice = chosen(rules, last, held, everybody, leaving, unreading, wish, left_out)
    if choice is not None:
        everybody = choice.members
    members = tuple(sorted(everybody))
    process_of = dict(zip(last.members, last.processes, strict=True)) | new
    without = frozenset() if state.proposal is None else state.proposal.without
    apart = tuple(host for host in apart if host in everybody)
    lacks_some = any(own.standing.applied < furthest.applied for own in promises.values())
    holding = frozenset(host for host in promised & everybody if held[host])
    leading = holding - leaving - {*apart}
    saved = max(own.standing.saved for own in promises.values())
    following = Generation(
        last.number + 1,
        members,
        tuple(process_of[host] for host in members),
        leader=leader_of(members, leading or holding or promised, apart),
        step=furthest.applied,
        outcome=furthest.outcome if lacks_some else None,
        fresh=tuple(host for host in members if host not in holding),
        placement=last.placement,
        start=last.start,
        apart=apart,
        saved=saved,
    )
    if choice is not None:
        holders = holders_of(rules, {host: held[host] for host in holding})
        following = replace(
            following,
            placement=choice.placement,
            holders=holders,
            plan=choice.plan,
            left_out=left_out,
        )
    following = replace(following, cause=_cause(state, following, new, without, leaving, reading))
    if set(apart) == set(members):
        return replace(following, is_last=True)  # No member could save a checkpoint.
    # The last generation may not have read its checkpoint yet, so its members may have no states
    # to transfer.
    is_unread = last.is_rewound and furthest.outcome is None
    is_moved = choice is not None and choice.placement != before
    if choice is not None and not (is_unread and is_moved):
        return following
    if choice is None:
        following = replace(following, lost=lost(rules, held))
        try:
            if rules.leaves_out:
                return lost_stages.without_lost(rules, last, following, held)
            if rules.remakes is not None:
                return lost_stages.remade(rules, following, held, promises)
        except RebuildImpossible as error:
            following = replace(following, cause=f"{following.cause}{error}")
    leader = leader_of(members, promised, apart)
    following = replace(following, step=saved, outcome=None, fresh=apart, leader=leader)
    reaching = frozenset(members).difference(apart)
    placement = rules.placed(last.placement, reaching, without_text, ()) if rules.rewinds else None
    if placement is not None:  # Members that are apart may need a stage too.
        placement = covering(rules, placement, frozenset(members), unreading)
    if placement is None:
        return replace(following, is_last=True)
    holders = holders_of(rules, serving_under(rules, placement, reaching)) if apart else ()
    if not all(holders):  # Too few members reach the checkpoint.
        return replace(following, is_last=True)
    return replace(following, placement=placement, holders=holders, is_rewound=True)


def _cause(
    state: State,
    following: Generation,
    new: Collection[int],
    cut_off: Collection[int],
    going: Collection[int],
    without_text: Collection[int] = (),
) -> str:
    """Describe why the last generation ends: which hosts failed, left, joined or rejoined.

    `cut_off` are members excluded because of broken links, `going` members that were asked to
    leave, and `without_text` hosts of the data stage that lack the text.
    """

    last, rules = state.generation, state.rules
    assert last is not None, "a member's"

    def how(host: int) -> str:
        if host in going:
            return "left"
        return "was partitioned from other hosts" if host in cut_off else "failed"

    def how_new(host: int) -> str:
        # Placements keep the nodes of failed hosts, and have none of an extra host that is new.
        is_new = host in following.apart or not rules.serves(last.placement, host)
        return "joined" if is_new else "rejoined"

    gone = [host for host in last.members if host not in following.members]
    causes = [f"host {host} {how(host)}" for host in gone]
    causes += [f"host {host} {how_new(host)}" for host in sorted(new)]
    causes += [f"host {host} lacks the training text" for host in sorted(without_text)]
    if causes:
        return ", ".join(causes)
    if going:
        leaving = ", ".join(f"host {host}" for host in sorted(going))
        return f"state transfer from {leaving} before leaving"
    if following.plan != last.plan and following.plan:
        return "a faster plan was found"
    return "transfers failed, or a false suspicion of a host"
