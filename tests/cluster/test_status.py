"""The status of a run, from what one of its hosts knows."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from skippipe_jax.cluster.status import status_of
from skippipe_jax.connections.directory import Directory
from skippipe_jax.connections.hello import Hello, RunIdentity
from skippipe_jax.connections.status import HostPresence, LinkStatus, Progress, TrainingStatus
from skippipe_jax.consensus.generations import ConsensusRules, ConsensusState, Generation

# Hosts 0 and 1 serve stage 0, host 2 stage 1, and host 3, which may come, none yet.
RULES = ConsensusRules(
    host_of=(0, 1, 2, 3),
    stages=2,
    placed=lambda placement, *_: placement,
    add_up=dict,
)
PLACEMENT = ((0, 1), (2,))
FIRST = Generation(1, (0, 1, 2), (7, 8, 9), 0, 4, placement=PLACEMENT)
LATER = replace(FIRST, number=2, members=(0, 1), processes=(7, 8), left_out=(1,))
TRAINING = TrainingStatus(1, Progress(6, 10), ((0, 1), (2,)), {0: "Iowa"}, (), False)


def directory(host: int = 0, *, has_begun: bool = True) -> Directory:
    hello = Hello(
        host, 3, 7 + host, f"host {host}", f"10.0.0.1:{host}", RunIdentity({"run_dir": "a"})
    )
    known = Directory(replace(hello, extra_hosts=1))
    known.addresses = {other: f"10.0.0.1:{other}" for other in range(3) if other != host}
    known.has_begun = known.outlives = has_begun
    return known


def state(generation: Generation | None, host: int = 0, **more: object) -> ConsensusState:
    is_member = generation is not None and host in generation.members
    given = ConsensusState(host, 7 + host, RULES, generation, is_member=is_member)
    return structs.replace(given, **more)


def states(hosts: tuple[HostPresence, ...]) -> list[str]:
    return [own.state for own in hosts]


def test_before_training_begins_those_are_waited_for_that_are_not_there():
    told = status_of(directory(has_begun=False), {2}, set(), None, None)
    assert (told.run, told.host, told.phase, told.leader) == ("a", 0, "gathering", 0)
    assert states(told.hosts) == ["present", "waited for", "present"]
    assert (told.generation, told.progress, told.stages) == (None, None, ())
    assert status_of(directory(), {1, 2}, set(), None, None).phase == "preparing"


def test_while_all_are_there_each_host_tells_who_serves_what():
    told = status_of(directory(1), {0, 2}, set(), state(FIRST, 1), TRAINING)
    assert (told.host, told.phase, told.generation, told.leader) == (1, "training", 1, 0)
    assert told.stages == ((0, 1), (2,))
    assert told.progress == TRAINING.progress
    assert told.hosts[0] == HostPresence(0, "present", (0,), "Iowa", "10.0.0.1:0", None)
    assert told.hosts[1] == HostPresence(1, "present", (0,), None, "10.0.0.1:1", "host 1")


def test_a_member_that_is_missed_is_waited_for_and_lost_once_others_go_on_without_it():
    missing = status_of(directory(), {1}, set(), state(FIRST), TRAINING)
    assert states(missing.hosts) == ["present", "present", "waited for"]
    assert (missing.phase, missing.stages) == ("waiting", ((0, 1), ()))
    without = status_of(directory(), {1}, set(), state(LATER), TRAINING)
    assert states(without.hosts) == ["present", "present", "lost"]
    assert (without.phase, without.generation, without.stages) == ("regrouping", 2, ((0, 1), ()))
    assert without.hosts[2].stages == (1,)
    parted = status_of(directory(), {1}, {2}, state(LATER), replace(TRAINING, generation=2))
    assert (parted.phase, parted.hosts[2].state) == ("training", "left")


def test_a_host_that_asks_to_be_taken_in_joins_as_itself_and_others_tell_it():
    back = status_of(directory(), {1, 2}, set(), state(LATER), replace(TRAINING, generation=2))
    assert (back.phase, states(back.hosts)[2]) == ("training", "joining")
    again = status_of(directory(), {1, 2}, set(), state(FIRST, waiting={2: 99}), TRAINING)
    assert states(again.hosts)[2] == "joining"
    own = status_of(directory(2), {0, 1}, set(), state(LATER, 2), None)
    assert (own.phase, states(own.hosts)) == ("joining", ["present", "present", "joining"])
    outside = directory(2)
    outside.is_outside = True
    early = status_of(outside, {0}, set(), state(None, 2), None)
    assert (early.phase, early.leader) == ("joining", None)


def test_where_hosts_are_always_the_same_training_tells_who_serves_what():
    told = status_of(directory(), {1, 2}, set(), None, replace(TRAINING, generation=0))
    assert (told.phase, told.generation, told.leader) == ("training", None, 0)
    assert told.stages == ((0, 1), (2,))
    assert [own.stages for own in told.hosts] == [(0,), (0,), (1,)]


def test_links_are_shown_of_hosts_that_are_present():
    pairs = ((0, 1), (1, 0), (0, 2), (2, 1))
    links = tuple(LinkStatus(source, target, 0.01, 1e6) for source, target in pairs)
    training = replace(TRAINING, links=links)
    there = status_of(directory(), {1, 2}, set(), state(FIRST), training)
    assert there.links == links
    lost = status_of(directory(), {1}, set(), state(LATER), training)
    assert lost.links == links[:2]
