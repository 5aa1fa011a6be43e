"""Choice of the next generation, once enough members of the last one have promised.

**Leaving.** A host may be asked to leave. Preemption notices may reach one host or all of them, at
different times. So a host leaves only when its notice is some heartbeats old, after a committed
step. If by then so many hosts were asked to leave that the rest could not continue, none of them
leaves, and the run ends.

**Diskless hosts** are members without access to the shared run directory. They train like all
others, with three exceptions. They do not lead, since the leader writes to the run
directory. They read no checkpoint, so in a rollback they get their states from others. They do not
continue alone: if all remaining members are diskless, the run ends. They may also lack the training
text, so none of them newly serves the data stage. A host that is to serve that stage, but has no
text or another one, reports this; no step is committed until it serves another stage.

**Placement.** Under a new placement, a host keeps the states of stages that it still serves, and
gets the others from a member that holds them. It counts as holding those once it has contributed to
a step. It drops the states of stages that it no longer serves when a step is applied, as they are
outdated then. So a generation that ends before its first step loses nothing.

**Lost stages**, whose state no host holds any more, may be recovered without a rollback. One kind
of policy rebuilds them (`buddy`, `average`). Every host that serves such a stage makes its state
from data of some members: copies of the stage, or its neighbor stages. The sources are decided with
the generation, so all hosts make the same state. All other stages keep their states, and the last
committed step stays committed. Stages are rebuilt when all members enter the generation. A host
counts as holding a rebuilt stage once it has contributed to a step; if the generation ends before,
the stage is rebuilt again.

The other policy (`skip`) leaves them out until a host serves them again. No node moves to such a
stage, and no path visits it: its nodes belong to lost hosts, and it returns with one of these. Its
state is then the one of the last checkpoint, to which it was carried over from its last save. One
member reads it and sends it to the others, as for a rebuilt stage. Only the first stage has the
embedding and the head, so it is never left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from skippipe_sched.problem.plan import DATA_STAGE

from skippipe_jax.config.cluster import SKIP
from skippipe_jax.consensus.generations import (
    ConsensusRules,
    ConsensusState,
    Generation,
    HostsOfStages,
    Placement,
    PlanRequest,
    Promise,
    RebuiltStage,
    Standing,
)
from skippipe_jax.errors import RebuildImpossible

HEARTBEATS_BEFORE_LEAVING = 4
"""Heartbeats with its notice that a leaving host sends before the others continue without it."""


def can_decide(last: Generation | None, hosts: Iterable[int]) -> bool:
    """Return True if these members can decide on the next generation: a majority of the last.

    Of two members of which one is diskless, the other decides alone: the run needs it anyway.
    """
    if last is None:
        return False
    some, reaching = set(hosts) & set(last.members), set(last.members) - set(last.diskless)
    if len(last.members) == 2 and len(reaching) == 1:
        return some >= reaching
    return 2 * len(some) > len(last.members)


def asks_store(state: ConsensusState) -> bool:
    """Return True if storage decides on the next generation: for two members that reach it."""
    last = state.generation
    return last is not None and len(last.members) == 2 and not last.diskless


def leader_of(members: Iterable[int], holding: Iterable[int], diskless: Collection[int]) -> int:
    """Choose the leader: preferably not diskless and holding its state, with the smallest id."""
    everybody, with_state = frozenset(members), frozenset(holding)
    choices = (
        with_state.difference(diskless),
        everybody.difference(diskless),
        with_state,
        everybody,
    )
    return min(next(some for some in choices if some))


def reading_without_text(
    state: ConsensusState, hosts: Iterable[int], placement: Placement
) -> frozenset[int]:
    """Return the hosts that serve the data stage under a placement and lack the text."""
    return state.rules.serving(placement, state.textless.intersection(hosts))[DATA_STAGE]


def is_readable(
    rules: ConsensusRules, before: Placement, placement: Placement, diskless: Iterable[int]
) -> bool:
    """Return True if hosts that are `diskless` serve the data stage only where they did `before`.

    The other hosts reach the training text.
    """
    diskless = frozenset(diskless)
    return (
        rules.serving(placement, diskless)[DATA_STAGE]
        <= rules.serving(before, diskless)[DATA_STAGE]
    )


# Placement and holders of states.


def chosen(
    rules: ConsensusRules,
    last: Generation,
    held: HostsOfStages,
    members: frozenset[int],
    going: frozenset[int],
    diskless: Collection[int],
    wish: PlanRequest | None,
    left_out: Collection[int] = (),
) -> tuple[Placement, frozenset[int], str] | None:
    """Choose the next placement, its members and its plan; return None if a stage is lost.

    The plan is a digest, empty for a repair plan. Hosts that are `going` stay members and serve
    their stages until the others hold the states of all stages. A `wish` is followed only if no
    host joins or leaves. Hosts that are `diskless` do not newly serve the data stage. Stages that
    are `left_out` need no host.
    """
    placement = last.placement
    is_same = members == set(last.members)
    if (
        wish is not None
        and is_same
        and not going
        and covers(rules, wish.placement, members)
        and is_readable(rules, placement, wish.placement, diskless)
    ):
        target, plan, staying = wish.placement, wish.plan, members
    else:
        staying = members - going
        target, plan = covering(rules, placement, staying, diskless, left_out), ""
    if target is None:
        staying, target = members, covering(rules, placement, members, diskless, left_out)
    if target is None or not are_held(held, left_out):
        return None
    serving = rules.serving(target, staying)
    if are_held([own & hosts for own, hosts in zip(serving, held, strict=True)], left_out):
        members = staying  # They hold all states.
    if members == set(last.members) and target == placement:
        plan = plan or last.plan
    return target, members, plan


def covering(
    rules: ConsensusRules,
    placement: Placement,
    hosts: frozenset[int],
    diskless: Collection[int],
    left_out: Collection[int] = (),
) -> Placement | None:
    """Return the placement if these hosts serve all stages under it, else another, or None.

    It may be replaced by a safer one (see `ConsensusRules`). Hosts that are `diskless` do not newly
    serve the data stage. Stages that are `left_out` need no host.
    """
    if covers(rules, placement, hosts, left_out):
        safer = rules.safest(placement, hosts, diskless) if not left_out else placement
        return safer if covers(rules, safer, hosts, left_out) else placement
    moved = rules.placed(placement, hosts, diskless, left_out)
    return moved if moved is not None and covers(rules, moved, hosts, left_out) else None


def covers(
    rules: ConsensusRules,
    placement: Placement,
    hosts: Collection[int],
    left_out: Collection[int] = (),
) -> bool:
    """Return True if these hosts serve all stages not left out, and each serves at least one."""
    serving = rules.serving(placement, hosts)
    return {*chain(*serving)} == {*hosts} and are_held(serving, left_out)


def are_held(held: HostsOfStages, left_out: Collection[int] = ()) -> bool:
    """Return True if each stage, except those left out, is held by some host."""
    return {*lost(held)} <= {*left_out}


def lost(held: HostsOfStages) -> tuple[int, ...]:
    """Return the stages whose state no host holds."""
    return tuple(stage for stage, hosts in enumerate(held) if not hosts)


def in_order(held: HostsOfStages) -> tuple[tuple[int, ...], ...]:
    """Return the holders of each stage as a generation names them."""
    return tuple(tuple(sorted(hosts)) for hosts in held)


def served(rules: ConsensusRules, generation: Generation, host: int) -> tuple[int, ...]:
    """Return the stages that a host serves in a generation."""
    return tuple(sorted(rules.serves(generation.placement, host)))


def held_after(
    rules: ConsensusRules, last: Generation, standings: Mapping[int, Standing]
) -> HostsOfStages:
    """Return the holders of each stage once all have applied the last step that any of them has.

    A host that is behind applies it to the stages that it serves in the last generation.
    """
    furthest = max(standing.applied for standing in standings.values())
    holds = {
        host: own.holds if own.applied == furthest else served(rules, last, host)
        for host, own in standings.items()
    }
    return [
        frozenset(host for host in holds if stage in holds[host]) for stage in range(rules.stages)
    ]


def entered_with(state: ConsensusState, generation: Generation) -> tuple[int, ...]:
    """Return the stages whose state a member holds when it enters a generation."""
    if state.host in generation.fresh:
        return ()
    if generation.is_rewound or generation.is_last or state.generation is None:
        return served(state.rules, generation, state.host)
    if state.standing.applied == generation.step:
        return state.standing.holds
    return served(state.rules, state.generation, state.host)  # It applies the last step on entry.


# Lost stages.


def remade(
    rules: ConsensusRules,
    following: Generation,
    held: HostsOfStages,
    promises: Mapping[int, Promise],
) -> Generation:
    """Return the next generation with its lost stages rebuilt.

    Raises:
        RebuildImpossible: if they cannot be rebuilt, or a rollback would lose no step.
    """
    assert rules.remakes is not None, "the policy is to rebuild"
    members = frozenset(following.members)
    placement = rules.placed(following.placement, members, following.diskless, ())
    if placement is None or not covers(rules, placement, members):
        raise RebuildImpossible("; too few hosts remain to serve all stages")
    if following.step == max(own.standing.saved for own in promises.values()):
        raise RebuildImpossible(
            f"; step {following.step} has a checkpoint, so a rollback loses no step"
        )
    copies = {host: own.standing.copies for host, own in promises.items()}
    made = rules.remakes(held, copies, following.step)
    return replace(following, placement=placement, holders=in_order(held), remade=made)


def still_left_out(
    rules: ConsensusRules, last: Generation, members: Iterable[int]
) -> tuple[int, ...]:
    """Return the stages that stay left out, as none of these members serves them."""
    serving = rules.serving(last.placement, members)
    return tuple(stage for stage in last.left_out if not serving[stage])


def can_leave_out(rules: ConsensusRules, generation: Generation) -> bool:
    """Return True if a generation leaves out only stages that it may, and no member serves."""
    if not generation.left_out:
        return True
    serving = rules.serving(generation.placement, generation.members)
    may_be = rules.leaves_out and DATA_STAGE not in generation.left_out
    return may_be and not any(serving[stage] for stage in generation.left_out)


def without_lost(
    rules: ConsensusRules, last: Generation, following: Generation, held: HostsOfStages
) -> Generation:
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
    if {*chain(*rules.serving(placement, members))} != members:
        # Extra hosts serve no stage under this placement; they get stages that others hold.
        placement = rules.placed(placement, members, following.diskless, lost)
        if placement is None:
            raise RebuildImpossible("; too few hosts remain to serve the other stages")
    serving = rules.serving(placement, members)

    def reader(stage: int) -> int:
        return min(serving[stage].difference(following.diskless), default=following.leader)

    return replace(
        following,
        placement=placement,
        holders=in_order(held),
        remade=tuple(
            RebuiltStage(stage, SKIP, following.saved, (reader(stage),))
            for stage in lost
            if serving[stage]
        ),
        left_out=tuple(stage for stage in lost if not serving[stage]),
        lost=tuple(stage for stage in lost if serving[stage] or stage not in last.left_out),
    )


# The next generation.


def going(state: ConsensusState) -> frozenset[int]:
    """Return the members that leave, once others hold the states of their stages."""
    if is_the_end(state):
        return frozenset()
    return frozenset(
        host for host in _asked_to_leave(state) if state.leaving[host] >= HEARTBEATS_BEFORE_LEAVING
    )


def is_the_end(state: ConsensusState) -> bool:
    """Return True if so many members were asked to leave that the run has to end."""
    asked = _asked_to_leave(state)
    if not asked or state.generation is None:
        return False
    staying = frozenset(state.members) - asked
    diskless = {*state.generation.diskless, *state.textless}
    most_leave = 2 * len(asked) > len(state.members)
    # Members that are diskless could not save checkpoints.
    if most_leave or staying <= {*state.generation.diskless}:
        return True
    left_out = state.generation.left_out
    return covering(state.rules, state.generation.placement, staying, diskless, left_out) is None


def _asked_to_leave(state: ConsensusState) -> frozenset[int]:
    return frozenset(state.leaving) & frozenset(state.members)


def next_generation(state: ConsensusState, promises: Mapping[int, Promise]) -> Generation:
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
    wishes = [own.wish for own in promises.values() if own.wish is not None]
    wish = next((own for own in wishes if own.number == last.number), None)
    leaving = going(state)
    everybody = promised | new.keys()
    without_text = state.textless & everybody
    if reading := reading_without_text(state, everybody, last.placement):
        last = replace(last, placement=rules.without_text(last.placement, reading), plan="")
    # New hosts have reported whether they are diskless.
    diskless = {
        host for host in everybody if host in (state.diskless if host in new else last.diskless)
    }
    unreading = diskless | without_text
    left_out = still_left_out(rules, last, everybody)
    choice = chosen(rules, last, held, everybody, leaving, unreading, wish, left_out)
    placement, everybody, plan = choice or (last.placement, everybody, "")
    members = tuple(sorted(everybody))
    process_of = dict(zip(last.members, last.processes, strict=True)) | new
    without = frozenset() if state.proposal is None else state.proposal.without
    diskless = tuple(host for host in members if host in diskless)
    lacks_some = any(own.standing.applied < furthest.applied for own in promises.values())
    holding = everybody.intersection(chain(*held))
    leading = holding - leaving - {*diskless}
    saved = max(own.standing.saved for own in promises.values())
    following = Generation(
        last.number + 1,
        members,
        tuple(process_of[host] for host in members),
        leader=leader_of(members, leading or holding or promised, diskless),
        step=furthest.applied,
        outcome=furthest.outcome if lacks_some else None,
        fresh=tuple(host for host in members if host not in holding),
        placement=placement,
        start=last.start,
        holders=in_order([hosts & everybody for hosts in held]) if choice else (),
        plan=plan,
        diskless=diskless,
        left_out=left_out if choice else (),
        saved=saved,
    )
    following = replace(following, cause=_cause(state, following, new, without, leaving, reading))
    if set(diskless) == set(members):
        return replace(following, is_last=True)  # No member could save a checkpoint.
    # The last generation may not have read its checkpoint yet, so its members may have no states
    # to transfer.
    is_unread = last.is_rewound and furthest.outcome is None
    # Some may have gone back further already (`RolledBack`): then all read the checkpoint again.
    if choice is not None and not (is_unread and (placement != before or lacks_some)):
        return following
    if choice is None:
        following = replace(following, lost=lost(held))
        try:
            if rules.leaves_out:
                return without_lost(rules, last, following, held)
            if rules.remakes is not None:
                return remade(rules, following, held, promises)
        except RebuildImpossible as error:
            following = replace(following, cause=f"{following.cause}{error}")
    leader = leader_of(members, promised.intersection(members), diskless)
    following = replace(following, step=saved, outcome=None, fresh=diskless, leader=leader)
    reaching = frozenset(members).difference(diskless)
    placement = rules.placed(last.placement, reaching, without_text, ()) if rules.rewinds else None
    if placement is not None:  # Members that are diskless may need a stage too.
        placement = covering(rules, placement, frozenset(members), unreading)
    if placement is None:
        return replace(following, is_last=True)
    holders = in_order(rules.serving(placement, reaching)) if diskless else ()
    if not all(holders):  # Too few members reach the checkpoint.
        return replace(following, is_last=True)
    return replace(following, placement=placement, holders=holders, is_rewound=True)


def _cause(
    state: ConsensusState,
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
        is_new = host in following.diskless or not rules.serves(last.placement, host)
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
