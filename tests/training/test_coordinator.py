"""The state machine of a host among others that are lost or join: a test for each row."""

from __future__ import annotations

from typing import Any

import pytest

from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import HostLeft, PeerTimeout
from skippipe_jax.training.elastic.coordinator import (
    RECONNECTS_AFTER_S,
    Action,
    AwaitGeneration,
    Cause,
    Confirming,
    Entered,
    Event,
    Failed,
    HostPolicy,
    Opening,
    OpenSession,
    Origin,
    Raise,
    Signal,
    State,
    StateSource,
    Stop,
    Stopped,
    Suspended,
    Training,
    WatchMembers,
    advance,
    await_first,
)

OWN, STEP = 1, 20
POLICY = HostPolicy(OWN, 60.0, 20.0, "rewind", replicas_diverge=False)


def generation(number: int, **fields: Any) -> Generation:
    return Generation(number, (0, OWN, 2), (0, 0, 0), leader=0, step=STEP, **fields)


def source(origin: Origin, step: int = STEP) -> StateSource:
    return StateSource(step, origin)


SECOND = generation(2)
HELD, SAVED, THEIRS = map(source, Origin)
OPENING, TRAINING = Opening(SECOND, HELD), Training(SECOND)
AWAITS, ABANDONS = AwaitGeneration(2, 60.0), AwaitGeneration(2, 60.0, abandons=True)
LOOKS, RETRIES = (Confirming(TRAINING, reconnects=again) for again in (False, True))
OPEN_RETRIES = Confirming(OPENING, reconnects=True)
FRESH = generation(3, fresh=(OWN,))
BEGINNING = Opening(FRESH, THEIRS)


@pytest.mark.parametrize(
    ("state", "event", "following", "action"),
    [
        (Suspended(1, None), Entered(SECOND, STEP), OPENING, OpenSession(SECOND, HELD)),
        (Suspended(2, None), Entered(FRESH, STEP), BEGINNING, OpenSession(FRESH, THEIRS)),
        (Suspended(1, HELD), Entered(SECOND), OPENING, OpenSession(SECOND, HELD)),
        (OPENING, Signal.OPENED, TRAINING, None),
        (OPENING, Signal.ROLLED_BACK, Opening(SECOND, SAVED), None),
        (BEGINNING, Signal.ROLLED_BACK, BEGINNING, None),
        (OPENING, Signal.ENDED, Suspended(2, HELD), AWAITS),
        (TRAINING, Signal.ENDED, Suspended(2, None), AWAITS),
        (OPENING, Failed(Cause.OWN), OPENING, Raise()),
        (TRAINING, Failed(Cause.OWN), TRAINING, Raise()),
        (TRAINING, Failed(Cause.SILENCE), LOOKS, WatchMembers(0.0)),
        (TRAINING, Failed(Cause.CHECKPOINT), LOOKS, WatchMembers(20.0)),
        (TRAINING, Failed(Cause.TRANSFER), RETRIES, WatchMembers(RECONNECTS_AFTER_S)),
        (OPENING, Failed(Cause.TRANSFER), OPEN_RETRIES, WatchMembers(RECONNECTS_AFTER_S)),
        (LOOKS, Signal.ENDED, Suspended(2, None), AWAITS),
        (LOOKS, Signal.MISSED, Suspended(2, None), ABANDONS),
        (LOOKS, Signal.TIME_OVER, TRAINING, Raise()),
        (RETRIES, Signal.ENDED, Suspended(2, None), AWAITS),
        (RETRIES, Signal.MISSED, Suspended(2, None), ABANDONS),
        (RETRIES, Signal.TIME_OVER, Suspended(2, None, has_reconnected=True), ABANDONS),
        (OPEN_RETRIES, Signal.TIME_OVER, Suspended(2, HELD, has_reconnected=True), ABANDONS),
    ],
)
def test_states_follow_each_other(
    state: State, event: Event, following: State, action: Action | None
):
    assert advance(state, event, POLICY) == (following, action)


@pytest.mark.parametrize(
    ("state", "event", "error", "text"),
    [
        (Suspended(0, THEIRS), Signal.TIME_OVER, PeerTimeout, "not admitted to the run within"),
        (Suspended(2, None), Signal.TIME_OVER, PeerTimeout, "no majority of hosts within"),
        (Suspended(2, None), Signal.LEFT, HostLeft, "continue without this host"),
        (Suspended(2, HELD), Signal.LEFT, HostLeft, "continue without this host"),
    ],
)
def test_a_host_stops(state: State, event: Event, error: type[Exception], text: str):
    following, action = advance(state, event, POLICY)
    assert following == Stopped()
    assert isinstance(action, Stop)
    assert isinstance(action.error, error)
    assert text in str(action.error)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_transfers_that_fail_again_before_a_step_has_been_made_are_this_hosts_own_error(
    is_open: bool, has_stepped: bool
):
    state, _ = advance(RETRIES if is_open else OPEN_RETRIES, Signal.TIME_OVER, POLICY)
    state, _ = advance(state, Entered(generation(3), STEP if is_open else None), POLICY)
    opened, _ = advance(state, Signal.OPENED, POLICY)
    state, action = advance(opened, Failed(Cause.TRANSFER, has_stepped), POLICY)
    assert action == WatchMembers(RECONNECTS_AFTER_S if has_stepped else 20.0)
    state, action = advance(state, Signal.TIME_OVER, POLICY)
    if has_stepped:
        assert state == Suspended(3, None, has_reconnected=True)
    else:
        assert (state, action) == (opened, Raise())


def test_what_cannot_come_is_an_error():
    for state, event in [
        (Stopped(), Signal.ENDED),
        (TRAINING, Signal.OPENED),
        (TRAINING, Entered(SECOND)),
    ]:
        with pytest.raises(ValueError, match="is not possible in state"):
            advance(state, event, POLICY)


def test_who_comes_waits_with_nothing():
    state, action = await_first(POLICY)
    assert action == AwaitGeneration(0, 60.0)
    _, action = advance(state, Entered(FRESH), POLICY)
    assert action == OpenSession(FRESH, source(Origin.PEERS, 0))


REWOUND = generation(3, is_rewound=True)
APART = generation(3, is_rewound=True, fresh=(OWN,), apart=(OWN,))


@pytest.mark.parametrize(
    ("entered", "held", "chosen"),
    [
        (generation(3), HELD, HELD),
        (generation(3, fresh=(OWN,)), source(Origin.OWN, 24), source(Origin.PEERS, 24)),
        (generation(3, fresh=(OWN,)), SAVED, THEIRS),
        (REWOUND, source(Origin.OWN, 24), source(Origin.CHECKPOINT, 24)),
        (REWOUND, THEIRS, SAVED),
        # It was to read a checkpoint, and that generation ended before it had: so it still is.
        (generation(3), source(Origin.CHECKPOINT, 24), source(Origin.CHECKPOINT, 24)),
        # Who reaches no folder reads no checkpoint.
        (APART, HELD, THEIRS),
    ],
)
def test_a_host_goes_on_with_what_its_generation_has_for_it(
    entered: Generation, held: StateSource, chosen: StateSource
):
    _, action = advance(Suspended(2, held), Entered(entered), POLICY)
    assert action == OpenSession(entered, chosen)


@pytest.mark.parametrize("diverge", [False, True])
@pytest.mark.parametrize("step", [STEP - 1, STEP + 2])
def test_only_hosts_whose_replicas_diverge_may_be_ahead(step: int, diverge: bool):
    policy = HostPolicy(OWN, 60.0, 20.0, "rewind", replicas_diverge=diverge)
    _, action = advance(Suspended(2, source(Origin.OWN, step)), Entered(generation(3)), policy)
    if diverge and step > STEP:
        assert action == OpenSession(generation(3), source(Origin.OWN, step))
    else:
        assert isinstance(action, Stop)
        assert f"local state is at step {step}, the run at step 20" in str(action.error)


def test_nobody_goes_on_with_nothing():
    _, action = advance(Suspended(2, THEIRS), Entered(generation(3)), POLICY)
    assert isinstance(action, Stop)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"apart": (0, OWN, 2)}, "host 3 was lost; only diskless hosts remain"),
        ({}, "a stage is lost and cannot be .*recovery.lost_stage = rewind"),
    ],
)
def test_the_last_generation_says_why_the_run_ends(fields: dict[str, Any], text: str):
    last = generation(3, is_last=True, cause="host 3 was lost", **fields)
    _, action = advance(Suspended(2, HELD), Entered(last), POLICY)
    assert isinstance(action, Stop)
    with pytest.raises(PeerTimeout, match=text):
        raise action.error
