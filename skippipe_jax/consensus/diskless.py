"""Diskless hosts: members that are `apart`, without access to the shared run directory.

They train like all others, with three exceptions. They do not lead, since the leader writes to the
run directory. They read no checkpoint, so in a rollback they get their states from others. They do
not continue alone: if all remaining members are apart, the run ends. They may also lack the
training text, so none of them newly serves the data stage. A host that is to serve that stage, but
has no text or another one, reports this; no step is committed until it serves another stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from skippipe_jax.consensus.generations import Generation, Rules, State

DATA_STAGE = 0
"""Stage whose hosts read the training text."""


def can_decide(last: Generation | None, hosts: Iterable[int]) -> bool:
    """Return True if these members can decide on the next generation: a majority of the last.

    Of two members of which one is apart, the other decides alone: the run needs it anyway.
    """
    if last is None:
        return False
    some, reaching = set(hosts) & set(last.members), set(last.members) - set(last.apart)
    if len(last.members) == 2 and len(reaching) == 1:
        return some >= reaching
    return 2 * len(some) > len(last.members)


def asks_store(state: State) -> bool:
    """Return True if storage decides on the next generation: for two members that reach it."""
    last = state.generation
    return last is not None and len(last.members) == 2 and not last.apart


def apart_of(state: State, members: Iterable[int], new: Collection[int]) -> tuple[int, ...]:
    """Return the members of the next generation that are apart; `new` ones have reported it."""
    before = () if state.generation is None else state.generation.apart
    return tuple(host for host in members if host in (state.apart if host in new else before))


def leader_of(members: Iterable[int], holding: Iterable[int], apart: Collection[int]) -> int:
    """Choose the leader: preferably not apart and holding its state, with the smallest id."""
    everybody, with_state = frozenset(members), frozenset(holding)
    choices = (with_state.difference(apart), everybody.difference(apart), with_state, everybody)
    return min(next(some for some in choices if some))


def reading_without_text(state: State, hosts: Iterable[int], placement: Any) -> frozenset[int]:
    """Return the hosts that serve the data stage under a placement and lack the text."""
    serves = state.rules.serves
    return frozenset(
        host for host in state.textless.intersection(hosts) if DATA_STAGE in serves(placement, host)
    )


def is_readable(rules: Rules, before: Any, placement: Any, apart: Iterable[int]) -> bool:
    """Return True if hosts that are `apart` serve the data stage only where they did `before`.

    The other hosts reach the training text.
    """
    return all(
        DATA_STAGE in rules.serves(before, host)
        for host in apart
        if DATA_STAGE in rules.serves(placement, host)
    )
