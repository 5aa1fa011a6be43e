"""Placement of stages on hosts.

A stage without a host is never run, so there are as few of these as possible. Hosts that hold
stages keep them, unless a stage would have no host otherwise; then as few bytes as possible are
loaded. The other hosts get the stages of the routes that are found with all their memory free. The
memory that is left is filled with the stages of the fewest hosts, so that the loss of a host
affects fewer stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from skippipe_sched import fields
from skippipe_sched.serving.case import (
    FRONT,
    HeldStages,
    ServingCase,
    checked_lost,
    checked_placement,
)
from skippipe_sched.serving.packing import hosts_of_stages
from skippipe_sched.serving.routing import TRIES, held_stages, search
from skippipe_sched.serving.shortest import Room, alone, empty_room, remaining_s, shortest

Objective = Literal["tokens_per_s", "seconds_per_token"]
OBJECTIVES: tuple[Objective, ...] = ("tokens_per_s", "seconds_per_token")


def place(
    case: ServingCase,
    objective: Objective = "tokens_per_s",
    held: Any = None,
    lost: Collection[int] = (),
    seed: int = 0,
    tries: int = TRIES,
) -> HeldStages:
    """Choose the stages that each host holds.

    As few stages as possible have no host. Then the placement maximizes the `tokens_per_s` of all
    groups in flight at once, or minimizes the `seconds_per_token` of one sequence alone. Hosts that
    are `lost` hold nothing.

    `held` gives the stages that each host holds already. Hosts that hold some keep them and load no
    others, except stages that would have no host otherwise, with as few bytes as possible. Hosts
    that hold nothing, such as new ones, get the stages that suit the objective. The same arguments
    give the same placement; more `tries` give a better one, in proportionally more time.

    Raises:
        InputError: if the objective is unknown, `held` does not fit the case, or a lost host is the
            front or not in the case.
    """
    fields.text(objective, "objective", OBJECTIVES)
    lost_hosts = list(checked_lost(case, lost))
    room_bytes = case.room_bytes.copy()
    room_bytes[lost_hosts] = 0.0
    kept = empty_room(case).held
    if held is not None:
        kept = held_stages(case, checked_placement(case, held, "held"))
        kept[lost_hosts] = False
    case = replace(case, room_bytes=room_bytes)
    empty = np.array(~kept.any(axis=1))
    empty[FRONT] |= held is None
    hosts = hosts_of_stages(case, np.where(kept | empty[:, None], 0.0, case.stage_bytes))
    kept = _with_needed(case, kept, empty, hosts)
    room = Room(kept, np.where(empty, room_bytes - kept @ case.stage_bytes, 0.0))
    run = np.array(kept.any(axis=0))
    run[list(hosts)] = True
    if held is None and not run.all():
        run = _stages_of_fastest_route(case, room, run)
    of_objective = replace(case, groups=1) if objective == "seconds_per_token" else case
    loaded = _loaded(of_objective, room, run, seed, tries)
    if loaded is None:
        # No route was found that uses the memory as required.
        room = _holding(case, room, {s: h for s, h in hosts.items() if empty[h]})
        loaded = _loaded(of_objective, room, np.array(room.held.any(axis=0)), seed, tries)
        assert loaded is not None, "each of these stages has a host"
    _fill(case, loaded)
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in loaded.held)


def _with_needed(
    case: ServingCase,
    kept: Bool[np.ndarray, "hosts stages"],
    empty: Bool[np.ndarray, " hosts"],
    hosts: Mapping[int, int],
) -> Bool[np.ndarray, "hosts stages"]:
    """Load the needed stages on hosts that hold others, of which the largest that fit stay."""
    kept = kept.copy()
    for host in {host for stage, host in hosts.items() if not (kept[host, stage] or empty[host])}:
        needed = [stage for stage, own in hosts.items() if own == host] + [0] * (host == FRONT)
        free = case.room_bytes[host] - case.stage_bytes[needed].sum()
        others = [stage for stage in np.flatnonzero(kept[host]).tolist() if stage not in needed]
        kept[host] = False
        kept[host, needed] = True
        for stage in sorted(others, key=lambda stage: -case.stage_bytes[stage]):
            if case.stage_bytes[stage] <= free:
                kept[host, stage] = True
                free -= case.stage_bytes[stage]
    return kept


def _stages_of_fastest_route(
    case: ServingCase, room: Room, run: Bool[np.ndarray, " stages"]
) -> Bool[np.ndarray, " stages"]:
    """Choose the stages that are run, if not all can be: as many as in `run`."""
    rest_s = remaining_s(case, skips=int((~run).sum()))
    route, _ = shortest(case, room, alone(case), rest_s)
    return run if route is None else np.array([host is not None for host in route])


def _loaded(
    case: ServingCase, room: Room, run: Bool[np.ndarray, " stages"], seed: int, tries: int
) -> Room | None:
    """Return the stages held for the best routes found, and the memory that is then left."""
    if not (room.free_bytes[:, None] >= case.stage_bytes[1:]).any():
        return room if room.held[:, run].any(axis=0).all() else None
    found = search(case.with_stages(run), Room(room.held[:, run], room.free_bytes), seed, tries)
    if found is None:
        return None
    for route in found:
        visited = zip(np.flatnonzero(run).tolist(), route, strict=True)
        room = _holding(case, room, {stage: host for stage, host in visited if host is not None})
    return room


def _holding(case: ServingCase, room: Room, hosts: Mapping[int, int]) -> Room:
    """Return the memory that is left if these hosts also hold these stages."""
    held = room.held.copy()
    held[list(hosts.values()), list(hosts)] = True
    return Room(held, room.free_bytes - (held & ~room.held) @ case.stage_bytes)


def _fill(case: ServingCase, room: Room) -> None:
    """Fill the memory that is left with stages that few hosts hold."""
    while True:
        fits = ~room.held & (case.stage_bytes <= room.free_bytes[:, None])
        fits[:, 0] = False
        if not fits.any():
            return
        holders = np.where(fits.any(axis=0), room.held.sum(axis=0), case.hosts)
        stage = int(np.argmin(holders))
        host = int(np.argmax(np.where(fits[:, stage], room.free_bytes, -np.inf)))
        room.held[host, stage] = True
        room.free_bytes[host] -= case.stage_bytes[stage]
