"""Status of a run as seen by one of its hosts; pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from skippipe_jax.connections.directory import Directory
from skippipe_jax.connections.status import (
    HostPresence,
    HostState,
    Phase,
    RunStatus,
    TrainingStatus,
)
from skippipe_jax.consensus.generations import ConsensusState, Generation


def status_of(
    directory: Directory,
    connected: Collection[int],
    left: Collection[int],
    state: ConsensusState | None,
    training: TrainingStatus | None,
) -> RunStatus:
    """Describe the run as seen by the host of this directory.

    Hosts in `connected` are alive, and hosts in `left` have sent a farewell. `state` is the host's
    state in the consensus of an elastic run, and `training` its training status.
    """
    own, generation = directory.hello, None if state is None else state.generation
    members = () if generation is None else generation.members
    hosts = sorted({own.host, *directory.others, *members})
    states = _presences(hosts, directory, connected, left, state)
    serving: Sequence[Collection[int]] = () if training is None else training.serving
    if state is not None and generation is not None:  # Includes lost hosts that would serve it.
        serving = [*map(sorted, state.rules.serving(generation.placement, hosts))]
    addresses = directory.addresses | {own.host: own.address}
    return RunStatus(
        run=own.run.identity.get("run_dir", ""),
        host=own.host,
        phase=_phase(directory, states, generation, training),
        generation=None if generation is None else generation.number,
        leader=(None if directory.is_outside else 0) if generation is None else generation.leader,
        progress=None if training is None else training.progress,
        hosts=tuple(
            HostPresence(
                host,
                states[host],
                tuple(stage for stage, serve in enumerate(serving) if host in serve),
                None if training is None else training.locations.get(host),
                addresses.get(host) or None,
                directory.names.get(host),
            )
            for host in hosts
        ),
        stages=tuple(
            tuple(host for host in serve if states[host] == "present") for serve in serving
        ),
        links=tuple(
            link
            for link in (() if training is None else training.links)
            if states[link.source] == states[link.target] == "present"
        ),
        links_are_measured=training is not None and training.links_are_measured,
    )


def _presences(
    hosts: Sequence[int],
    directory: Directory,
    connected: Collection[int],
    left: Collection[int],
    state: ConsensusState | None,
) -> dict[int, HostState]:
    own, members, training = directory.hello.host, {*hosts}, {*hosts}
    if state is not None and state.generation is not None:
        members = {*state.members}
        training = members - state.waiting.keys()
        is_outside = not state.is_member
    else:
        is_outside = directory.is_outside
    if is_outside:
        training.discard(own)
    presences: dict[int, HostState] = {}
    for host in hosts:
        if host == own or host in connected:
            presences[host] = "present" if host in training else "joining"
        elif host in left:
            presences[host] = "left"
        else:
            presences[host] = "waited for" if host in members else "lost"
    return presences


def _phase(
    directory: Directory,
    states: Mapping[int, HostState],
    generation: Generation | None,
    training: TrainingStatus | None,
) -> Phase:
    if states[directory.hello.host] == "joining":
        return "joining"
    if not directory.has_begun:
        return "gathering"
    if "waited for" in states.values():
        return "waiting"
    if training is None:
        return "preparing"
    is_current = training.generation == (0 if generation is None else generation.number)
    return "training" if is_current else "regrouping"
