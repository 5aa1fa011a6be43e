"""How long others wait while states move from host to host."""

from __future__ import annotations

import jax
import pytest

from skippipe_jax.config import Config, DataConfig, ModelConfig
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.runtime.handover import PATIENCE, Handovers
from skippipe_jax.runtime.topology import Device, Topology
from tests.program.test_compiler import plan_of

CONFIG = Config(
    model=ModelConfig(width=8, layers=2, heads=2, kv_heads=1, ffn_width=12, context=6),
    data=DataConfig(sequence_length=6, microbatch_size=2),
)
GIB = 2**30
# Hosts 0 and 1 serve stage 0, hosts 2 and 3 stage 1; the link between the last two is slow.
PLAN = plan_of(
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    locations=["here", "here", "here", "there"],
    links=[["here", "there", 1, 1e-6]],
    same_location={"latency_ms": 1, "bandwidth_GiB_per_s": 1e-3},
)
HOST_OF = (0, 1, 2, 3)


def handovers(*holders: list[int]) -> Handovers:
    devices = [(Device(node, 0, "cpu"),) for node in HOST_OF]
    numbers = HopNumbers(compile_plan(PLAN, HOST_OF)[0].first_free_hop)
    return Handovers(Topology.of(CONFIG, PLAN, 0, HOST_OF, devices, numbers), CONFIG, holders)


def state_bytes(found: Handovers, stage: int) -> int:
    leaves = jax.tree.leaves(found.shapes[stage])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def test_where_nothing_moves_nobody_waits():
    assert handovers([0, 1], [2, 3]).patience_s([]) == 0.0


def test_others_wait_for_each_state_by_its_own_link():
    found = handovers([0], [2])
    quick, slow = state_bytes(found, 0) / (1e-3 * GIB), state_bytes(found, 1) / (1e-6 * GIB)
    assert found.patience_s([]) == pytest.approx(PATIENCE * (quick + slow))


def test_a_stage_that_is_made_anew_counts_as_coming_over_the_slowest_link():
    found = handovers([0, 1], [])
    slow = 2 * state_bytes(found, 1) / (1e-6 * GIB)
    assert found.patience_s([1]) == pytest.approx(PATIENCE * slow)
