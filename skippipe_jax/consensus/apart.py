"""Hosts that are apart: members that do not reach the folder of the run, which others share.

They train like all others, and leave to those what only who reaches the folder can do: to lead, as
the leader writes there; to read a checkpoint, so when all go back to one they take their states
from others; and to go on alone. Where all that are left are apart, the run ends. They may lack the
run's text, too: none serves the data stage that has not come to serve it. A host that is to serve
that stage, and finds that its text is none or another, tells so: no step counts until it serves
another stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from skippipe_jax.consensus.generations import Generation, Rules, State

DATA_STAGE = 0
"""Who serves it reads the run's text."""


def can_decide(last: Generation | None, hosts: Iterable[int]) -> bool:
    """Tell whether these members can decide on what follows a generation: a majority of them.

    Of two members one of which is apart the other decides alone, since nothing goes on without it.
    """
    if last is None:
        return False
    some, reaching = set(hosts) & set(last.members), set(last.members) - set(last.apart)
    if len(last.members) == 2 and len(reaching) == 1:
        return some >= reaching
    return 2 * len(some) > len(last.members)


def asks_store(state: State) -> bool:
    """Tell whether storage decides on what follows: between two members that both reach it."""
    last = state.generation
    return last is not None and len(last.members) == 2 and not last.apart


def apart_of(state: State, members: Iterable[int], new: Collection[int]) -> tuple[int, ...]:
    """List the next members that are apart; those that are `new` have said so."""
    before = () if state.generation is None else state.generation.apart
    return tuple(host for host in members if host in (state.apart if host in new else before))


def leader_of(members: Iterable[int], holding: Iterable[int], apart: Collection[int]) -> int:
    """Choose the leader: a member that is not apart, and of those one that holds its state."""
    everybody, with_state = frozenset(members), frozenset(holding)
    choices = (with_state.difference(apart), everybody.difference(apart), with_state, everybody)
    return min(next(some for some in choices if some))


def reading_without_text(state: State, hosts: Iterable[int], placement: Any) -> frozenset[int]:
    """List the hosts that serve the data stage under a placement without the run's text."""
    serves = state.rules.serves
    return frozenset(
        host for host in state.textless.intersection(hosts) if DATA_STAGE in serves(placement, host)
    )


def is_readable(rules: Rules, before: Any, placement: Any, apart: Iterable[int]) -> bool:
    """Tell whether those that are apart serve the data stage only as they did before.

    The others reach the run's text.
    """
    return all(
        DATA_STAGE in rules.serves(before, host)
        for host in apart
        if DATA_STAGE in rules.serves(placement, host)
    )
