"""State machine of one host for losses and joins of hosts; `runner` does what a state asks for.

| state | event | next state |
| --- | --- | --- |
| `Suspended` | `Entered` | `Opening` |
| | `TIME_OVER` | `Stopped` by `PeerTimeout` |
| | `LEFT` | `Stopped` by `HostLeft` |
| `Opening` | `OPENED` | `Training` |
| | `ROLLED_BACK` | `Opening`, from a checkpoint |
| `Opening`, `Training` | `ENDED` | `Suspended` |
| | `Failed`, another host may be the cause | `Confirming` |
| | `Failed`, none can be | the same: the error is raised |
| `Confirming` | `ENDED` | `Suspended` |
| | `MISSED` | `Suspended`, abandons the last generation |
| | `TIME_OVER`, a transfer failed | `Suspended`, abandons the last generation |
| | `TIME_OVER`, else | what it was before: the error is raised |

A host abandons a generation in which it cannot make another step, as the others may not detect the
cause: they may never miss a host that it missed for a moment. If transfers fail although all hosts
are alive, a connection broke, and the next generation reconnects all. If transfers fail again
before a step is made, the error is raised.

A generation that is the last, or that continues from a step other than this host's, leads to
`Stopped` instead of `Opening`. A host that rejoins starts as `JOINING`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import HostLeft, PeerTimeout


class StateOrigin(Enum):
    """Origin of the states of a host's stages as it enters a generation."""

    OWN = "own"
    CHECKPOINT = "checkpoint"
    PEERS = "peers"


@dataclass(frozen=True)
class StateSource:
    """State with which a host enters a generation.

    Attributes:
        step: number of iterations that it has completed.
        origin: the origin of its states.
    """

    step: int
    origin: StateOrigin


RECONNECTS_AFTER_S = 2.0
"""Seconds within which the death of a host that broke a transfer is detected."""


class Cause(Enum):
    """Possible cause of an error."""

    OWN = "this host alone"
    SILENCE = "another host that did not answer in time"
    CHECKPOINT = "another host that did not write its part of a checkpoint"
    TRANSFER = "another host, or a connection to it"


@dataclass(frozen=True)
class HostPolicy:
    """Constants on which the decisions of a host depend.

    Attributes:
        host: its number in the run.
        rejoin_s: seconds that it waits for the next generation.
        detection_s: seconds after which the loss of any host is detected.
        lost_stage: policy for a stage that no host holds: `recovery.lost_stage`.
        replicas_diverge: whether replicas take local steps between two averages (outer mode).
    """

    host: int
    rejoin_s: float
    detection_s: float
    lost_stage: str
    replicas_diverge: bool


# States.


@dataclass(frozen=True)
class Suspended:
    """State of a host that waits for the generation after number `after`; 0 for one that joins.

    `Entered`, `TIME_OVER` or `LEFT` follows. Then the host closes its session if one is open:
    `source` is None until then, as its steps may still be committed. With `abandons`, it first
    notifies the others that it abandons generation `after`. `has_reconnected`, here and below:
    transfers had failed although all hosts were alive.
    """

    after: int
    source: StateSource | None
    has_reconnected: bool = False
    abandons: bool = False


JOINING = Suspended(0, StateSource(0, StateOrigin.PEERS))
"""First state of a host that rejoins."""


@dataclass(frozen=True)
class Opening:
    """State of a host that opens the session of a generation, together with its other hosts.

    `OPENED`, `ROLLED_BACK`, `ENDED` or `Failed` follows.
    """

    generation: Generation
    source: StateSource
    has_reconnected: bool = False


@dataclass(frozen=True)
class Training:
    """State of a host that trains."""

    generation: Generation
    has_reconnected: bool = False


@dataclass(frozen=True)
class Confirming:
    """State of a host that checks whether a lost host has caused an error.

    It watches the members of the generation for some `seconds`; `ENDED`, `MISSED` or `TIME_OVER`
    follows. If there is no loss, it `reconnects` or raises the error. The error occurred in the
    state `interrupted`.
    """

    interrupted: Opening | Training
    reconnects: bool
    seconds: float


@dataclass(frozen=True)
class Stopped:
    """State of a host that takes no further part, and raises `error`."""

    error: Exception


CoordinatorState = Suspended | Opening | Training | Confirming | Stopped


# Events.


@dataclass(frozen=True)
class Entered:
    """Event: this host has entered the next generation.

    `closed_step` is the number of iterations after which it has closed its session, if one was
    open.
    """

    generation: Generation
    closed_step: int | None = None


@dataclass(frozen=True)
class Failed:
    """Event: an error occurred; `has_stepped` if a step was made before in its generation."""

    cause: Cause
    has_stepped: bool = False


class Signal(Enum):
    """Events without values."""

    OPENED = "all hosts of the generation have opened its session"
    ROLLED_BACK = "the newest checkpoint is damaged on a host: all roll back to an earlier one"
    ENDED = "the generation has ended"
    MISSED = "a member of the generation has failed or is silent"
    TIME_OVER = "the wait timed out"
    LEFT = "the others continue without this host, which leaves the run"


CoordinatorEvent = Entered | Failed | Signal


def advance(
    state: CoordinatorState, event: CoordinatorEvent, policy: HostPolicy
) -> CoordinatorState:
    """Apply an event; return the new state.

    If `Failed` leads back to `Opening` or `Training`, at once or after `Confirming`, no other host
    has caused the error, and the caller raises it.

    Raises:
        ValueError: if the event is not possible in that state.
    """
    match state, event:
        case Suspended(_, None, has_reconnected), Entered(generation, int(step)):
            return _open(generation, StateSource(step, StateOrigin.OWN), has_reconnected, policy)
        case Suspended(_, StateSource() as source, has_reconnected), Entered(generation, None):
            return _open(generation, source, has_reconnected, policy)
        case Suspended(after), Signal.TIME_OVER:
            missing = "no majority of hosts" if after else "not admitted to the run"
            return Stopped(
                PeerTimeout(f"{missing} within cluster.rejoin_s = {policy.rejoin_s:g} s")
            )
        case Suspended(), Signal.LEFT:
            return Stopped(HostLeft("the others continue without this host"))
        case Opening(generation, _, has_reconnected), Signal.OPENED:
            return Training(generation, has_reconnected)
        case Opening(_, source), Signal.ROLLED_BACK:
            origin = source.origin if source.origin == StateOrigin.PEERS else StateOrigin.CHECKPOINT
            return replace(state, source=replace(source, origin=origin))
        case Opening() | Training(), Signal.ENDED:
            return _suspend(state)
        case Opening() | Training(), Failed(Cause.OWN):
            return state
        case Opening() | Training(), Failed(cause, has_stepped):
            reconnects = cause == Cause.TRANSFER and (has_stepped or not state.has_reconnected)
            seconds = RECONNECTS_AFTER_S if reconnects else policy.detection_s
            return Confirming(state, reconnects, 0.0 if cause == Cause.SILENCE else seconds)
        case Confirming(interrupted), Signal.ENDED:
            return _suspend(interrupted)
        case Confirming(interrupted), Signal.MISSED:
            return _suspend(interrupted, abandons=True)
        case Confirming(interrupted, reconnects=True), Signal.TIME_OVER:
            return _suspend(interrupted, abandons=True, reconnects=True)
        case Confirming(interrupted), Signal.TIME_OVER:
            return interrupted
        case _:
            raise ValueError(f"{event} is not possible in state {state}")


def _suspend(
    state: Opening | Training, *, abandons: bool = False, reconnects: bool = False
) -> Suspended:
    source = state.source if isinstance(state, Opening) else None
    return Suspended(state.generation.number, source, reconnects, abandons)


def _open(
    generation: Generation, held: StateSource, has_reconnected: bool, policy: HostPolicy
) -> Opening | Stopped:
    """Choose the origin of a host's states, given those `held`; stop if it cannot continue."""
    origin = held.origin
    if generation.is_last:
        return Stopped(PeerTimeout(_end_message(generation, policy.lost_stage)))
    if policy.host in generation.fresh:
        origin = StateOrigin.PEERS
    elif generation.is_rewound:
        origin = StateOrigin.CHECKPOINT
    elif origin != StateOrigin.CHECKPOINT:
        # With diverging replicas a host may be ahead by local steps, and keeps them.
        is_behind = held.step < generation.step
        is_other = is_behind if policy.replicas_diverge else held.step != generation.step
        if origin == StateOrigin.PEERS or is_other:
            problem = (
                f"local state is at step {held.step}, the run at step {generation.step}: restart "
                "this host to fetch the state from a peer"
            )
            return Stopped(PeerTimeout(problem))
    return Opening(generation, replace(held, origin=origin), has_reconnected)


def _end_message(generation: Generation, lost_stage: str) -> str:
    if set(generation.diskless) == set(generation.members):
        return f"{generation.cause}; only diskless hosts remain: no checkpoint could be written"
    return (
        f"{generation.cause}; a stage is lost and cannot be recovered "
        f"(recovery.lost_stage = {lost_stage})"
    )
