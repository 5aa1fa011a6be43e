"""Consensus of the hosts of a run on its members and its committed steps, despite failures.

A *generation* is a set of hosts that train together, its members. When a member is lost, or a host
joins, the hosts enter the next generation together. They choose it by single-decree Paxos (Lamport,
"Paxos Made Simple", 2001) among the members of the last one, a majority of which has to live. One
of two members is not a majority: there, the first to create a file in storage that both reach
decides. `next_generation` has the rules for members that do not reach it.

A step is *committed* as follows. A host that holds the averaged gradients of all its stages sends
its totals to the leader. Once the leader has the totals of all members, all of them hold their
gradients. So the leader's sum of the totals, which every update needs, is also the commit message.
A host applies a step only with that sum.

When a generation ends, all remaining members can therefore apply the last step that any of them has
applied: each reports its last step and the sum, and promises to take no further part in the
generation. A step without a sum on any of them was applied by none of them, and is run again with
the same microbatches. Another host, such as a leader that was partitioned after it applied a step,
may be ahead; it takes the state of the others before it rejoins.

All of this is one pure function, `advance`: (state, event) -> (state, effects). It uses no clock.
Messages may be lost, late or duplicated: on `Tick`, missing ones are sent again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec.structs import replace

from skippipe_jax.consensus.generations import (
    NO_BALLOT,
    Abandoned,
    Accepted,
    Apply,
    Ask,
    Commit,
    ConsensusRules,
    ConsensusState,
    Contribution,
    Decided,
    Effect,
    Enter,
    Event,
    Generation,
    Heartbeat,
    Held,
    Message,
    NotMember,
    PlanRequest,
    Presence,
    Promise,
    Proposal,
    Received,
    RolledBack,
    Saved,
    Send,
    Standing,
    Stored,
    TextMissing,
    Tick,
    Told,
    Writes,
    after_heartbeat,
)
from skippipe_jax.consensus.next_generation import (
    asks_store,
    can_decide,
    can_leave_out,
    entered_with,
    going,
    next_generation,
    reading_without_text,
    served,
)


def first_state(
    host: int, rules: ConsensusRules, generation: Generation, saved: int
) -> ConsensusState:
    """Return the initial state of a member of the first generation."""
    process = generation.processes[generation.members.index(host)]
    holds = served(rules, generation, host)
    standing = Standing(generation.step, saved=saved, holds=holds)
    return ConsensusState(host, process, rules, generation, is_member=True, standing=standing)


def advance(state: ConsensusState, event: Event) -> tuple[ConsensusState, list[Effect]]:
    """Apply an event; return the new state and its effects.

    A joiner starts with `ConsensusState(...)`.
    """
    match event:
        case Received(source, message):
            return _received(state, source, message)
        case Presence(host, is_there):
            return _presence(state, host, is_there=is_there), []
        case Held(number, step, totals, copies):
            is_current = number == state.number and state.takes_part
            if not is_current or step != state.standing.applied + 1:
                return state, []  # The generation in which it was computed has ended.
            assert state.generation is not None, "a member's"
            # By now it has received the states that it lacked.
            holds = {*state.standing.holds, *served(state.rules, state.generation, state.host)}
            standing = replace(
                state.standing, holds_next=True, holds=tuple(sorted(holds)), copies=copies
            )
            return _contribute(replace(state, standing=standing, totals=totals))
        case Saved(step):
            saved = max(step, state.standing.saved)
            return replace(state, standing=replace(state.standing, saved=saved)), []
        case RolledBack(number, step):
            if number != state.number or not state.takes_part:
                return state, []  # The next generation detects it again.
            assert state.generation is not None, "a member's"
            generation = dataclasses.replace(state.generation, step=step)
            standing = replace(state.standing, applied=step, saved=step)
            return replace(state, generation=generation, standing=standing), []
        case Abandoned(number):
            if number != state.number or not state.takes_part:
                return state, []
            # Its heartbeats carry this ballot. That of any proposal is greater, so none waits.
            ballot = 0, state.host
            return replace(state, promised=ballot, highest=max(state.highest, ballot)), []
        case Stored(generation):
            return _announce(state, generation)
        case Tick():
            return _tick(state)
        case TextMissing():
            return replace(state, textless=state.textless | {state.host}), []
        case Told():
            return replace(state, leaving={state.host: 0} | dict(state.leaving)), []
        case PlanRequest():
            return replace(state, wish=event), []


def _received(
    state: ConsensusState, source: int, message: Message
) -> tuple[ConsensusState, list[Effect]]:
    if not _is_of_run(state, message):
        return state, []
    match message:
        case Decided(generation):
            return _decided(state, generation)
        case Heartbeat():
            return _note_heartbeat(state, source, message)
        case Contribution(number, step, totals):
            is_current = number == state.number and state.takes_part
            return _contribution(state, source, step, totals) if is_current else (state, [])
        case Commit(number, step, outcome):
            is_current = number == state.number and state.takes_part
            is_leader = state.generation is not None and source == state.generation.leader
            return _count(state, step, outcome) if is_current and is_leader else (state, [])
        case Ask():
            return _asked(state, source, message)
        case Promise() | Accepted():
            return _answered(state, source, message)


def _is_of_run(state: ConsensusState, message: Message) -> bool:
    """Return True if the generation in a message, if any, is valid for this start of the run."""
    match message:
        case Promise(wish=PlanRequest(_, placement)) if not state.rules.fits(placement):
            return False
        case Decided(generation):
            number = generation.number
        case Ask(number, _, Generation() as generation):
            pass
        case Promise(number, _, _, (_, generation), _):
            pass
        case _:
            return True
    own, rules = state.generation, state.rules
    is_of_start = own is None or own.start == generation.start
    has_hosts = set(generation.members) <= set(rules.hosts)
    is_of_number = generation.number == number > 0
    is_ours = is_of_start and is_of_number and has_hosts and rules.fits(generation.placement)
    stages = {*generation.lost, *generation.left_out, *(one.stage for one in generation.remade)}
    is_whole = len(generation.holders) in (0, rules.stages) and stages <= {*range(rules.stages)}
    return is_ours and is_whole and can_leave_out(rules, generation)


def _presence(state: ConsensusState, host: int, *, is_there: bool) -> ConsensusState:
    """Note that a host is present or suspected; the next tick acts on all such changes at once."""
    if is_there:
        return replace(state, suspected=state.suspected - {host})
    waiting = {other: process for other, process in state.waiting.items() if other != host}
    return replace(state, suspected=state.suspected | {host}, waiting=waiting)


def _tick(state: ConsensusState) -> tuple[ConsensusState, list[Effect]]:
    """Send a heartbeat and messages that may have been lost; propose if it is this host's turn."""
    if state.host in state.leaving:
        state = _count_leaving_heartbeat(state, state.host)
    effects = state.to_others(_own_heartbeat(state), state.rules.hosts)
    if state.takes_part and state.totals is not None:
        state, more = _contribute(state)
        effects += more
    cut_off = state.cut_off
    remaining = [host for host in state.members if state.is_remaining(host) and host not in cut_off]
    # Hosts that only wait to join do not end it before the next commit (see `_count`).
    has_to_end = state.highest > NO_BALLOT or len(remaining) < len(state.members)
    generation = state.generation
    if generation is not None and reading_without_text(state, remaining, generation.placement):
        has_to_end = True  # It cannot complete a step.
    continues = generation is not None and not generation.is_last
    if state.number and continues and has_to_end and state.host == min(remaining, default=None):
        state, more = _propose(state)
        effects += more
    return state, effects


def _own_heartbeat(state: ConsensusState) -> Heartbeat:
    return Heartbeat(
        state.number,
        state.process,
        state.promised,
        missed=tuple(sorted(state.suspected)),
        leaves=state.host in state.leaving,
        is_diskless=state.rules.is_diskless,
        lacks_text=state.host in state.textless,
    )


def _note_heartbeat(
    state: ConsensusState, source: int, heartbeat: Heartbeat
) -> tuple[ConsensusState, list[Effect]]:
    """Note the status in a heartbeat; send the decided generation to a host that is behind."""
    missed = [host for host in heartbeat.missed if host in state.rules.hosts]
    others = state.textless - {source}
    state = replace(
        state,
        complaints=after_heartbeat(state.complaints, source, missed),
        textless=others | {source} if heartbeat.lacks_text else others,
    )
    if heartbeat.leaves:
        state = _count_leaving_heartbeat(state, source)
    elif source in state.leaving:  # It has restarted.
        state = replace(state, leaving={h: n for h, n in state.leaving.items() if h != source})
    if not state.number or heartbeat.number > state.number:
        return state, []
    assert state.generation is not None, "has a number"
    if heartbeat.number == state.number:
        ballot = heartbeat.promised if source in state.members else NO_BALLOT
        return replace(state, highest=max(state.highest, ballot)), []
    if heartbeat.number == 0 and not state.generation.has(source, heartbeat.process):
        diskless = state.diskless | {source} if heartbeat.is_diskless else state.diskless - {source}
        return replace(
            state, waiting={**state.waiting, source: heartbeat.process}, diskless=diskless
        ), []
    return state, [Send(source, Decided(state.generation))]


def _count_leaving_heartbeat(state: ConsensusState, host: int) -> ConsensusState:
    return replace(state, leaving={**state.leaving, host: state.leaving.get(host, 0) + 1})


# Steps.


def _contribute(state: ConsensusState) -> tuple[ConsensusState, list[Effect]]:
    generation, step = state.generation, state.standing.applied + 1
    assert generation is not None, "a member's"
    if state.leads:
        return _contribution(state, state.host, step, state.totals)
    return state, [Send(generation.leader, Contribution(generation.number, step, state.totals))]


def _contribution(
    state: ConsensusState, source: int, step: int, totals: Any
) -> tuple[ConsensusState, list[Effect]]:
    """Add the totals of a member, on the leader; commit the step once all totals are there."""
    standing, number = state.standing, state.number
    if not state.leads or source not in state.members:
        return state, []
    if step == standing.applied and standing.outcome is not None:
        return state, [Send(source, Commit(number, step, standing.outcome))]  # The commit was lost.
    lengths = {len(own) for own in (*state.heard.values(), totals)}
    if step != standing.applied + 1 or len(lengths) > 1:
        return state, []
    state = replace(state, heard={**state.heard, source: totals})
    if len(state.heard) < len(state.members):
        return state, []
    outcome = state.rules.add_up(state.heard)
    commits = state.to_others(Commit(number, step, outcome), state.members)
    state, effects = _count(state, step, outcome)
    return state, commits + effects


def _count(state: ConsensusState, step: int, outcome: Any) -> tuple[ConsensusState, list[Effect]]:
    """Apply a committed step; on the leader, propose the next generation if a change waits."""
    if step != state.standing.applied + 1 or not state.standing.holds_next:
        return state, []
    assert state.generation is not None, "a member's"
    before, holds = state.standing, served(state.rules, state.generation, state.host)
    standing = Standing(step, outcome, saved=before.saved, holds=holds, copies=before.copies)
    state = replace(state, standing=standing, totals=None, heard={})
    effects: list[Effect] = [Apply(step, outcome)]
    is_wished = state.wish is not None and state.wish.number == state.number
    has_to_change = bool(state.joining or going(state) or is_wished)
    if state.leads and has_to_change and state.host not in state.cut_off:
        state, more = _propose(state)
        effects += more
    return state, effects


# The next generation.


def _propose(state: ConsensusState) -> tuple[ConsensusState, list[Effect]]:
    """Propose with a greater ballot than any known one, or continue the current proposal."""
    # A host that does not reach enough members to decide would only outbid one that does.
    if not (
        asks_store(state) or can_decide(state.generation, filter(state.is_remaining, state.members))
    ):
        return state, []
    proposal, number = state.proposal, state.number + 1
    # If acceptors are lost, those that are cut off no more may be needed, so all are asked again.
    is_dated = proposal is not None and (
        proposal.ballot < max(state.promised, state.highest) or proposal.without != state.cut_off
    )
    if proposal is None or is_dated:
        proposal = Proposal((state.highest[0] + 1, state.host), state.cut_off)
        state = replace(state, highest=proposal.ballot, proposal=proposal)
    elif proposal.generation is None:
        state, effects = _promised(state)  # Hosts without an answer may be suspected by now.
        if effects:
            return state, effects
    return _ask_members(state, Ask(number, proposal.ballot, proposal.generation))


def _ask_members(state: ConsensusState, ask: Ask) -> tuple[ConsensusState, list[Effect]]:
    """Send a request to the members of the last generation; process this host's own answer."""
    assert state.proposal is not None, "is under way"
    asked = [host for host in state.members if host not in state.proposal.without]
    effects = state.to_others(ask, asked)
    state, answers = _asked(state, state.host, ask)
    for answer in answers:
        assert isinstance(answer, Send), "an answer"
        state, more = _received(state, state.host, answer.message)
        effects += more
    return state, effects


def _asked(state: ConsensusState, source: int, ask: Ask) -> tuple[ConsensusState, list[Effect]]:
    """Answer a request for the generation after this host's own."""
    if not state.number or ask.number > state.number + 1:
        return state, []
    if ask.number <= state.number:
        assert state.generation is not None, "a member's"
        return state, [Send(source, Decided(state.generation))]
    if source not in state.members or source != ask.ballot[1]:
        return state, []
    if ask.ballot < state.promised:
        # A host must not take its own status for that of another, which would be a complaint.
        return state, [] if source == state.host else [Send(source, _own_heartbeat(state))]
    state = replace(state, promised=ask.ballot, highest=max(state.highest, ask.ballot))
    if ask.generation is None:
        wish = state.wish if state.leads else None
        promise = Promise(ask.number, ask.ballot, state.standing, state.accepted, wish)
        return state, [Send(source, promise)]
    state = replace(state, accepted=(ask.ballot, ask.generation))
    return state, [Send(source, Accepted(ask.number, ask.ballot))]


def _answered(
    state: ConsensusState, source: int, answer: Promise | Accepted
) -> tuple[ConsensusState, list[Effect]]:
    """Record an answer to this host's proposal, and continue the proposal."""
    proposal = state.proposal
    if proposal is None or (answer.number, answer.ballot) != (state.number + 1, proposal.ballot):
        return state, []
    if source not in state.members:
        return state, []
    if isinstance(answer, Promise):
        if proposal.generation is not None or source in proposal.without:
            return state, []
        promises = {**proposal.promises, source: answer}
        return _promised(replace(state, proposal=replace(proposal, promises=promises)))
    accepted_by = proposal.accepted_by | {source}
    state = replace(state, proposal=replace(proposal, accepted_by=accepted_by))
    if proposal.generation is None or not can_decide(state.generation, accepted_by):
        return state, []
    return _announce(state, proposal.generation)


def _promised(state: ConsensusState) -> tuple[ConsensusState, list[Effect]]:
    """Choose and propose the next generation once all live members and a majority promised."""
    proposal = state.proposal
    assert proposal is not None, "is under way"
    promises = proposal.promises
    awaited = [host for host in state.members if host not in proposal.without]
    everybody = all(host in promises for host in awaited if state.is_remaining(host))
    if not everybody or not (asks_store(state) or can_decide(state.generation, promises)):
        return state, []
    if asks_store(state):
        return state, [Writes(next_generation(state, promises))]
    accepted = [promise.accepted for promise in promises.values() if promise.accepted is not None]
    latest = max(accepted, key=lambda pair: pair[0], default=None)
    generation = next_generation(state, promises) if latest is None else latest[1]
    state = replace(state, proposal=replace(proposal, generation=generation))
    return _ask_members(state, Ask(state.number + 1, proposal.ballot, generation))


def _announce(state: ConsensusState, generation: Generation) -> tuple[ConsensusState, list[Effect]]:
    """Enter a generation, and announce it to all others."""
    messages = state.to_others(Decided(generation), state.rules.hosts)
    state, effects = _decided(state, generation)
    return state, messages + effects


def _decided(state: ConsensusState, generation: Generation) -> tuple[ConsensusState, list[Effect]]:
    """Enter a generation that is later than this host's own, or stay outside if not a member."""
    if state.generation is not None and generation.number <= state.generation.number:
        return state, []
    # A host that missed a generation has missed steps, unless all go back to a checkpoint.
    has_state = state.number > 0 and state.number == generation.number - 1
    takes_state = state.host in generation.fresh or generation.is_rewound or generation.is_last
    is_member = generation.has(state.host, state.process) and (has_state or takes_state)
    effects: list[Effect] = []
    # Without an outcome, this host has rolled back (`RolledBack`), and does so again with all.
    lacks_step = state.standing.applied < generation.step and generation.outcome is not None
    if is_member and not takes_state and lacks_step:
        effects.append(Apply(generation.step, generation.outcome))
    effects.append(Enter(generation) if is_member else NotMember(generation))
    members = generation.members
    if not is_member and state.host in state.leaving:
        # It exits at once, so it announces the generation that excludes it first.
        effects = state.to_others(Decided(generation), state.rules.hosts) + effects
    entered = ConsensusState(
        state.host,
        state.process,
        state.rules,
        generation,
        is_member=is_member,
        standing=Standing(
            generation.step,
            saved=max(state.standing.saved, generation.saved),
            holds=entered_with(state, generation) if is_member else (),
            copies=state.standing.copies if is_member and not takes_state else (),
        ),
        suspected=state.suspected,
        waiting={host: own for host, own in state.waiting.items() if host not in members},
        leaving=state.leaving,
        diskless=state.diskless,
        textless=state.textless,
    )
    return entered, effects
