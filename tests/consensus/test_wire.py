"""Messages as JSON, and what becomes of what is none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from skippipe_jax.consensus.decisions import _asked, advance, first_state
from skippipe_jax.consensus.generations import (
    MOST_NUMBERS,
    Accepted,
    Ask,
    Commit,
    ConsensusState,
    Contribution,
    Decided,
    Generation,
    Heartbeat,
    Held,
    HostsOfStages,
    Message,
    Presence,
    Promise,
    RebuiltStage,
    Received,
    Send,
    Standing,
    Stored,
    Tick,
    Writes,
)
from tests.consensus import exploration
from tests.harness.json_values import damaged, json_values

HOSTS, NODES, STAGES = 3, 6, 2
NUMBERS = st.integers(0, 3) | st.integers(0, (1 << 62) - 1)
BALLOTS = st.tuples(NUMBERS, st.integers(-1, HOSTS))
SUMS = st.lists(st.floats(allow_nan=False), max_size=3).map(tuple)
PLACEMENTS = st.permutations(range(NODES)).map(lambda nodes: (tuple(nodes[:3]), tuple(nodes[3:])))


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    members = tuple(sorted(draw(st.sets(st.integers(0, HOSTS), min_size=1))))
    anybody = st.lists(st.integers(0, (1 << 48) - 1), min_size=len(members), max_size=len(members))
    placement = draw(PLACEMENTS | st.lists(st.lists(NUMBERS).map(tuple), max_size=3).map(tuple))
    stages, most = st.integers(0, max(0, len(placement) - 1)), min(len(placement), 2)
    return Generation(
        draw(NUMBERS),
        members,
        tuple(draw(anybody)),
        draw(st.sampled_from(members)),
        draw(NUMBERS),
        draw(st.none() | SUMS),
        tuple(sorted(draw(st.sets(st.sampled_from(members))))),
        draw(st.booleans()),
        draw(st.booleans()),
        placement,
        draw(st.text(max_size=5)),
        draw(st.sampled_from([0, 7])),
        tuple(draw(st.lists(st.lists(st.sampled_from(members)).map(tuple), max_size=2))),
        draw(st.text(max_size=5)),
        lost=tuple(draw(st.lists(stages, max_size=most))),
        remade=tuple(draw(st.lists(remade(stages, st.sampled_from(members)), max_size=most))),
        diskless=tuple(sorted(draw(st.sets(st.sampled_from(members))))),
        left_out=tuple(draw(st.lists(stages, max_size=most))),
    )


def remade(
    stages: st.SearchStrategy[int], hosts: st.SearchStrategy[int]
) -> st.SearchStrategy[RebuiltStage]:
    by_one, by_two = (st.lists(hosts, min_size=n, max_size=n).map(tuple) for n in (1, 2))
    ways = st.sampled_from(["buddy", "skip"])
    return st.builds(RebuiltStage, stages, ways, NUMBERS, by_one) | st.builds(
        RebuiltStage, stages, st.just("average"), NUMBERS, by_two
    )


COPIES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2).map(tuple)
STAGES_HELD = st.lists(st.integers(0, STAGES), max_size=STAGES).map(tuple)
STANDINGS = st.builds(
    Standing, NUMBERS, st.none() | SUMS, st.booleans(), NUMBERS, STAGES_HELD, copies=COPIES
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ask, NUMBERS, BALLOTS, st.none() | generations()),
    st.builds(Promise, NUMBERS, BALLOTS, STANDINGS, st.none() | st.tuples(BALLOTS, generations())),
    st.builds(Accepted, NUMBERS, BALLOTS),
    st.builds(Decided, generations()),
    st.builds(
        Heartbeat, NUMBERS, NUMBERS, BALLOTS, leaves=st.booleans(), is_diskless=st.booleans()
    ),
    st.builds(Contribution, NUMBERS, NUMBERS, SUMS),
    st.builds(Commit, NUMBERS, NUMBERS, SUMS),
)
FIELDS = st.sampled_from(["members", "number", "applied", "outcome", "leader", "placement"])
NAMES = st.sampled_from(
    ["Ask", "Promise", "Accepted", "Decided", "Heartbeat", "Contribution", "Commit"]
)
JSON = json_values(NAMES, FIELDS)


def through_json(message: Message) -> Message:
    return msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(message))), Message)


@given(MESSAGES)
@settings(max_examples=60)
def test_a_message_comes_as_it_was_sent(message: Message):
    assert through_json(message) == message


def test_totals_that_are_no_numbers_come_as_they_were_sent():
    sent = Contribution(1, 1, (math.inf, -math.inf, math.nan))
    assert repr(through_json(sent)) == repr(sent)


@given(
    JSON | st.tuples(NAMES, JSON, JSON).map(list) | damaged(MESSAGES.map(msgspec.to_builtins), JSON)
)
@settings(max_examples=120)
def test_what_is_no_message_is_a_value_error_and_nothing_else(given: Any):
    try:
        message: Message = msgspec.convert(given, Message)
    except ValueError:
        return
    assert isinstance(message, Message)
    # What is believed can be passed on.
    assert repr(through_json(message)) == repr(message)


@pytest.mark.parametrize(
    "given",
    [
        ["Commit", 1, 1, [10**400]],
        ["Commit", 1, 1, ["1"]],
        ["Commit", 1, 1, [True]],
        ["Commit", 1, 1, None],
        ["Contribution", 1, 1, [0.0] * (MOST_NUMBERS + 1)],
        ["Contribution", True, 1, []],
        ["Heartbeat", 1, 1, {"0": 1, "1": 2}, [], False],
        ["Heartbeat", -1, 1, [0, 0], [], False],
        ["Heartbeat", 1 << 62, 1, [0, 0], [], False],
        ["Heartbeat", 1, 1, [0, 0], [], 0],
        ["Promise", 1, [0, 0], {"saved": 1}, None],
        ["Decided", []],
        ["Decided"],
        [["Decided"]],
        {"Decided": 1},
        "Decided",
        None,
    ],
    ids=range(17),
)
def test_a_message_with_anything_out_of_range_is_none(given: Any):
    with pytest.raises(ValueError):  # noqa: PT011
        msgspec.convert(given, Message)


def fits(placement: Any) -> bool:
    nodes = sorted(node for own in placement for node in own)
    return len(placement) == STAGES and nodes == [*range(NODES)]


def remakes(held: HostsOfStages, copies: Mapping[int, Any], step: int) -> tuple[RebuiltStage, ...]:
    """The first host that has promised makes what is lost from what it has itself."""
    del copies
    source = min(chain(*held))
    return tuple(
        RebuiltStage(stage, "buddy", step, (source,)) for stage, own in enumerate(held) if not own
    )


RULES = replace(
    exploration.RULES, host_of=(0, 1, 2, 0, 1, 2), stages=STAGES, fits=fits, remakes=remakes
)
PLACEMENT = ((0, 1, 2), (3, 4, 5))
FIRST = Generation(1, (0, 1, 2), (0, 1, 2), 0, 0, placement=PLACEMENT, start=7)


def is_sound(state: ConsensusState) -> bool:
    """Whether a host can go on from there."""
    generation = state.generation
    return generation is None or (
        set(generation.members) <= set(RULES.hosts)
        and fits(generation.placement)
        and len(generation.holders) in (0, STAGES)
        and len(state.heard) <= HOSTS
        and len(state.waiting) <= HOSTS
        and (state.proposal is None or set(state.proposal.promises) <= set(state.members))
    )


# Most messages would be about a generation that is nobody's.
OWN_MESSAGES = st.one_of(
    st.builds(Contribution, st.just(1), st.just(1), SUMS),
    st.builds(Commit, st.just(1), st.just(1), SUMS),
    st.builds(Promise, st.just(2), st.just((1, 0)), STANDINGS, st.none()),
    st.just(Accepted(2, (1, 0))),
)
HOST = st.integers(0, HOSTS - 1)


def asked_by(host: int) -> st.SearchStrategy[Received]:
    """A host asks for a ballot of its own, or to accept a generation."""
    ballots = st.tuples(st.integers(0, 3), st.just(host))
    asks = st.builds(Ask, st.just(2), ballots, st.none() | generations())
    return asks.map(lambda ask: Received(host, ask))


EVENTS = st.one_of(
    st.sampled_from([Tick(), Held(1, 1, (0.5, 0.5))]),
    st.builds(Presence, st.integers(1, HOSTS - 1), is_there=st.booleans()),
    st.builds(Received, HOST, OWN_MESSAGES),
    st.builds(Received, HOST, MESSAGES),
    HOST.flatmap(asked_by),
)


@given(st.lists(EVENTS, max_size=8), st.booleans(), st.sets(st.integers(1, 2)))
@settings(max_examples=80)
def test_no_message_leads_a_host_to_where_it_cannot_go_on(
    events: list[Any], is_new: bool, left: set[int]
):
    """From whomever it comes: also from a host that is no member any more."""
    members = (0, *sorted(left))
    generation = Generation(1, members, members, 0, 0, placement=PLACEMENT, start=7)
    state = ConsensusState(0, 9, RULES) if is_new else first_state(0, RULES, generation, 0)
    for event in events:
        state, effects = advance(state, event)
        for effect in effects:
            if isinstance(effect, Send):
                through_json(effect.message)
            if isinstance(effect, Writes):
                state, _ = advance(state, Stored(effect.generation))
        assert is_sound(state)


def test_a_host_that_is_no_member_has_no_say():
    two = Generation(1, (0, 2), (0, 2), 0, 0, placement=PLACEMENT, start=7)
    state = first_state(0, RULES, two, 0)
    for message in (
        Ask(2, (9, 1), None),
        Heartbeat(1, 1, (1 << 40, 1)),
        Contribution(1, 1, (1.0,)),
        Commit(1, 1, (1.0,)),
    ):
        assert advance(state, Received(1, message)) == (state, [])
    state, _ = advance(state, Received(2, Heartbeat(1, 2, (1, 2))))
    state, _ = advance(state, Tick())
    assert state.proposal is not None
    ballot = state.proposal.ballot
    for message in (Promise(2, ballot, Standing(0), None), Accepted(2, ballot)):
        after, effects = advance(state, Received(1, message))
        assert (after, effects) == (state, [])


def test_a_step_counts_by_the_word_of_the_leader_alone():
    state = first_state(1, RULES, FIRST, 0)
    state, _ = advance(state, Held(1, 1, (1.0,)))
    told = Commit(1, 1, (3.0,))
    assert advance(state, Received(2, told)) == (state, [])
    assert advance(state, Received(0, told))[0].standing.applied == 1


def test_a_ballot_is_asked_for_by_its_own_host():
    state = first_state(1, RULES, FIRST, 0)
    assert advance(state, Received(2, Ask(2, (1, 0), None))) == (state, [])
    assert advance(state, Received(0, Ask(2, (1, 0), None)))[0].promised == (1, 0)


def test_a_host_that_refuses_a_ballot_still_says_whom_it_misses():
    """Or the other would take its complaints for withdrawn."""
    state = first_state(1, RULES, FIRST, 0)
    for event in (Presence(2, is_there=False), Received(2, Ask(2, (5, 2), None))):
        state, _ = advance(state, event)
    _, [refusal] = advance(state, Received(0, Ask(2, (3, 0), None)))
    assert refusal == Send(0, Heartbeat(1, 1, (5, 2), missed=(2,)))


def test_a_host_that_refuses_its_own_ballot_does_not_complain():
    state = first_state(0, RULES, FIRST, 0)
    state, _ = advance(state, Presence(2, is_there=False))
    state = structs.replace(state, promised=(5, 1))
    assert _asked(state, 0, Ask(2, (3, 0), None)) == (state, [])


@pytest.mark.parametrize(
    "generation",
    [
        Generation(2, (0, 1), (0, 1), 0, 0, placement=PLACEMENT, start=8),
        Generation(2, (0, 1, 3), (0, 1, 2), 0, 0, placement=PLACEMENT, start=7),
        Generation(2, (0, 1), (0, 1), 0, 0, placement=((0, 1, 2),), start=7),
        Generation(2, (0, 1), (0, 1), 0, 0, placement=((0, 1, 2), (3, 4, 6)), start=7),
        Generation(2, (0, 1), (0, 1), 0, 0, placement=((0, 1, 2), (2, 4, 5)), start=7),
    ],
    ids=["another start", "a host too many", "a stage too few", "another node", "a node twice"],
)
def test_a_generation_that_is_none_of_this_start_changes_nothing(generation: Generation):
    state = first_state(1, RULES, FIRST, 0)
    assert advance(state, Received(0, Decided(generation))) == (state, [])
    assert advance(state, Received(0, Ask(2, (1, 0), generation))) == (state, [])


def test_totals_of_other_lengths_are_added_to_none():
    state = first_state(0, RULES, FIRST, 0)
    state, _ = advance(state, Held(1, 1, (1.0, 1.0)))
    assert advance(state, Received(1, Contribution(1, 1, (1.0,)))) == (state, [])
    state, _ = advance(state, Received(1, Contribution(1, 1, (1.0, 2.0))))
    assert set(state.heard) == {0, 1}
