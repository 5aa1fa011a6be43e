"""Who holds the state of which stage, as hosts come and go and stages move between them.

Under another placement a host keeps the states of the stages that it goes on serving, and takes
those that are new to it from a member that holds them. Until it has contributed to a step it does
not count as holding them. What it served before it gives up only once a step has been applied, by
which it would fall behind: so a generation that ends before its first step loses nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from skippipe_jax.consensus.apart import is_readable
from skippipe_jax.consensus.generations import Generation, Rules, Standing, State, Wish

Held = Mapping[int, Collection[int]]
"""The stages whose state each host holds."""


class Choice(NamedTuple):
    """The next placement, who is a member under it, and by which plan if it is no quick one."""

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
    wish: Wish | None,
    left_out: Collection[int] = (),
) -> Choice | None:
    """Choose the placement and members to go on with; None if a stage is lost.

    Those that are `going` serve what they have served until the others hold all of it, and are
    members no longer then. A `wish` counts where nobody comes or goes. Some hosts are `apart`.
    Stages that are `left_out` need nobody.
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
        members = staying  # All is handed on.
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

    It may be made safer. Some of the hosts are `apart`. Stages that are `left_out` need none.
    """
    if covers(rules, placement, hosts, left_out):
        safer = rules.safest(placement, hosts, apart) if not left_out else placement
        return safer if covers(rules, safer, hosts, left_out) else placement
    moved = rules.placed(placement, hosts, apart, left_out)
    return moved if moved is not None and covers(rules, moved, hosts, left_out) else None


def covers(
    rules: Rules, placement: Any, hosts: Iterable[int], left_out: Collection[int] = ()
) -> bool:
    """Tell whether some hosts serve all stages but those left out, and none of them nothing."""
    serving = serving_under(rules, placement, hosts)
    return all(serving.values()) and are_held(rules, serving, left_out)


def are_held(rules: Rules, held: Held, left_out: Collection[int] = ()) -> bool:
    """Tell whether some host holds each of the stages, but for those that are left out."""
    return {*lost(rules, held)} <= {*left_out}


def lost(rules: Rules, held: Held) -> tuple[int, ...]:
    """List the stages whose state nobody holds."""
    return tuple(stage for stage, holding in enumerate(holders_of(rules, held)) if not holding)


def holders_of(rules: Rules, held: Held) -> tuple[tuple[int, ...], ...]:
    """List the hosts that hold the state of each stage."""
    return tuple(
        tuple(host for host in sorted(held) if stage in held[host]) for stage in range(rules.stages)
    )


def serving_under(rules: Rules, placement: Any, hosts: Iterable[int]) -> dict[int, frozenset[int]]:
    """Return the stages that each of some hosts serves under a placement."""
    return {host: rules.serves(placement, host) for host in hosts}


def served(rules: Rules, generation: Generation, host: int) -> tuple[int, ...]:
    """List the stages that a host serves in a generation."""
    return tuple(sorted(rules.serves(generation.placement, host)))


def held_after(rules: Rules, last: Generation, standings: Mapping[int, Standing]) -> Held:
    """Return what hosts hold once all have applied the last step that one of them has.

    Who has not yet does so to what it serves in the last generation.
    """
    furthest = max(standing.applied for standing in standings.values())
    return {
        host: own.holds if own.applied == furthest else served(rules, last, host)
        for host, own in standings.items()
    }


def entered_with(state: State, generation: Generation) -> tuple[int, ...]:
    """List the stages whose state a member holds as it enters a generation."""
    if state.host in generation.fresh:
        return ()
    if generation.is_rewound or generation.is_last or state.generation is None:
        return served(state.rules, generation, state.host)
    if state.standing.applied == generation.step:
        return state.standing.holds
    return served(state.rules, state.generation, state.host)  # It has just applied a step.
