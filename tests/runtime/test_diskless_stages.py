"""Who saves which stage where some hosts do not reach the folder of the run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import pytest
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config, DataConfig, ModelConfig
from skippipe_jax.program.compiler import Hop, HopNumbers, compile_plan
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.state import StageState, make_states
from skippipe_jax.runtime.state_transfer import DisklessStages
from skippipe_jax.runtime.topology import Device, Topology
from tests.harness.thread_hosts import ThreadHost, on_hosts
from tests.harness.training_runs import assert_same_bits, by_name
from tests.sched.examples import plan_of

CONFIG = Config(
    model=ModelConfig(width=8, layers=2, heads=2, kv_heads=1, ffn_width=12, context=6),
    data=DataConfig(sequence_length=6, microbatch_size=2),
)
# Both hosts have a replica of stage 0, and the second one alone has stage 1.
PLAN = plan_of([[0, 1], [2]], [[0, 2], [1, 2]])
HOST_OF = (0, 1, 1)
STEP = 7


class TeamOfThreads:
    """A member of a generation, as far as saving knows one."""

    def __init__(self, host: ThreadHost, *apart: int):
        self._host, self.index, self.count = host, host.index, host.count
        self.apart, self.timeout_s = apart, 60.0
        self.put, self.get = host.put, host.get


class Carried:
    """Links over which arrays come at once."""

    def __init__(self):
        self.arrays: dict[tuple[int, int], jax.Array] = {}

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        self.arrays[hop.number, iteration] = array

    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        while (hop.number, iteration) not in self.arrays:
            time.sleep(0.001)
        array = self.arrays[hop.number, iteration]
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        return array


def topology_of(plan: Plan, host: int) -> Topology:
    programs = compile_plan(plan, HOST_OF)
    devices = [(Device(own, HOST_OF[:node].count(own), "cpu"),) for node, own in enumerate(HOST_OF)]
    numbers = HopNumbers(programs[host].first_free_hop)
    return Topology.of(CONFIG, plan, host, HOST_OF, devices, numbers)


def states_of(topology: Topology) -> dict[int, StageState]:
    return make_states(replace(CONFIG, seed=topology.host), topology)


def saved(*apart: int) -> list[dict[int, dict[str, Any]]]:
    """What each host saves of the stages, as the first replica of each has it."""
    carried: Any = Carried()
    topologies = [topology_of(PLAN, host) for host in (0, 1)]
    states = [states_of(topology) for topology in topologies]

    def save(host: ThreadHost) -> dict[int, dict[str, Any]]:
        team: Any = TeamOfThreads(host, *apart)
        own, topology = states[host.index], topologies[host.index]
        given = DisklessStages(topology, CONFIG, team)
        assert given.source_of == ({1: 1} if 1 in apart else {})
        after = given.after(STEP, own, {0: carried, 1: carried})
        return Replicas(topology, own).owned_stages(apart) | after

    held = {0: states[0][0].to_save(), 1: states[1][2].to_save()}
    found = []
    for own in on_hosts(2, save):
        assert isinstance(own, dict), own
        for stage, state in own.items():
            assert_same_bits(by_name(state), by_name(held[stage]))
        found.append(own)
    return found


def test_where_all_reach_the_folder_the_first_replica_is_saved():
    assert [own.keys() for own in saved()] == [{0}, {1}]


@pytest.mark.nightly
def test_a_stage_that_only_a_host_apart_holds_is_given_to_the_leader():
    first, second = saved(1)
    assert (first.keys(), second.keys()) == ({0, 1}, set())
