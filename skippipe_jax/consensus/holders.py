"""Owners of the states of stages, and the placement that follows when hosts join or leave.

Under a new placement, a host keeps the states of stages that it still serves, and gets the others
from a member that holds them. It counts as holding those once it has contributed to a step. It
drops the states of stages that it no longer serves when a step is applied, as they are outdated
then. So a generation that ends before its first step loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from skippipe_jax.consensus.diskless import is_readable
from skippipe_jax.consensus.generations import Generation, PlanRequest, Rules, Standing, State

Held = Mapping[int, Collection[int]]
"""Stages whose state each host holds, by host."""


class Choice(NamedTuple):
    """Next placement, its members, and the digest of its plan; empty for a repair plan."""

    placement: Any
    members: frozenset[int]
    plan: str


def chosen(
    rules: Rules,
    last: Generation,
    held: Held,
    members: frozenset[int],
    going: frozenset[int],
    apart: Collection[int],
    wish: PlanRequest | None,
    left_out: Collection[int] = (),
) -> Choice | None:
    """Choose the placement and members of the next generation; return None if a stage is lost.

    Hosts that are `going` stay members and serve their stages until the others hold the states of
    all stages. A `wish` is followed only if no host joins or leaves. Hosts that are `apart` do not
    newly serve the data stage. Stages that are `left_out` need no host.
    """
    placement = last.placement
    is_same = members == set(last.members)
    if (
        wish is not None
        and is_same
        and not going
        and covers(rules, wish.placement, members)
        and is_readable(rules, placement, wish.placement, apart)
    ):
        target, plan, staying = wish.placement, wish.plan, members
    else:
        staying = members - going
        target, plan = covering(rules, placement, staying, apart, left_out), ""
    if target is None:
        staying, target = members, covering(rules, placement, members, apart, left_out)
    if target is None or not are_held(rules, held, left_out):
        return None
    serving = serving_under(rules, target, staying)
    if are_held(
        rules, {host: own & {*held.get(host, ())} for host, own in serving.items()}, left_out
    ):
        members = staying  # They hold all states.
    if members == set(last.members) and target == placement:
        plan = plan or last.plan
    return Choice(target, members, plan)


def covering(
    rules: Rules,
    placement: Any,
    hosts: frozenset[int],
    apart: Collection[int],
    left_out: Collection[int] = (),
) -> Any:
    """Return the placement if these hosts serve all stages under it, else another, or None.

    It may be replaced by a safer one (see `Rules`). Hosts that are `apart` do not newly serve the
    data stage. Stages that are `left_out` need no host.
    """
    if covers(rules, placement, hosts, left_out):
        safer = rules.safest(placement, hosts, apart) if not left_out else placement
        return safer if covers(rules, safer, hosts, left_out) else placement
    moved = rules.placed(placement, hosts, apart, left_out)
    return moved if moved is not None and covers(rules, moved, hosts, left_out) else None


def covers(
    rules: Rules, placement: Any, hosts: Iterable[int], left_out: Collection[int] = ()
) -> bool:
    """Return True if these hosts serve all stages not left out, and each serves at least one."""
    serving = serving_under(rules, placement, hosts)
    return all(serving.values()) and are_held(rules, serving, left_out)


def are_held(rules: Rules, held: Held, left_out: Collection[int] = ()) -> bool:
    """Return True if each stage, except those left out, is held by some host."""
    return {*lost(rules, held)} <= {*left_out}


def lost(rules: Rules, held: Held) -> tuple[int, ...]:
    """Return the stages whose state no host holds."""
    return tuple(stage for stage, holding in enumerate(holders_of(rules, held)) if not holding)


def holders_of(rules: Rules, held: Held) -> tuple[tuple[int, ...], ...]:
    """Return for each stage the hosts that hold its state."""
    return tuple(
        tuple(host for host in sorted(held) if stage in held[host]) for stage in range(rules.stages)
    )


def serving_under(rules: Rules, placement: Any, hosts: Iterable[int]) -> dict[int, frozenset[int]]:
    """Return the stages that each of these hosts serves under a placement."""
    return {host: rules.serves(placement, host) for host in hosts}


def served(rules: Rules, generation: Generation, host: int) -> tuple[int, ...]:
    """Return the stages that a host serves in a generation."""
    return tuple(sorted(rules.serves(generation.placement, host)))


def held_after(rules: Rules, last: Generation, standings: Mapping[int, Standing]) -> Held:
    """Return the stages that hosts hold once all have applied the last step that any of them has.

    A host that is behind applies it to the stages that it serves in the last generation.
    """
    furthest = max(standing.applied for standing in standings.values())
    return {
        host: own.holds if own.applied == furthest else served(rules, last, host)
        for host, own in standings.items()
    }


def entered_with(state: State, generation: Generation) -> tuple[int, ...]:
    """Return the stages whose state a member holds when it enters a generation."""
    if state.host in generation.fresh:
        return ()
    if generation.is_rewound or generation.is_last or state.generation is None:
        return served(state.rules, generation, state.host)
    if state.standing.applied == generation.step:
        return state.standing.holds
    return served(state.rules, state.generation, state.host)  # It applies the last step on entry.
