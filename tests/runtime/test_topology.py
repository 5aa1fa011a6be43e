"""All hosts lay out a run alike, though the JAX of each may know its own devices only."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.problem.links import GIBIBYTE

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig, Config, ModelConfig, NetworkConfig
from skippipe_jax.config.hardware import ONE_DEVICE
from skippipe_jax.runtime.topology import (
    Device,
    Topology,
    devices_of_nodes,
    unused_devices_warnings,
)
from skippipe_jax.training.trainer import Trainer
from tests.sched.examples import plan_of

# Of stage 1 each host has a node, of stage 2 host 1 has both; all links are quick.
PLAN = plan_of([[0], [1, 2], [3, 4]], [[0, 1, 3], [0, 2, 4]])
HOST_OF = (0, 0, 1, 1, 1)
# The first host has more devices than the second.
KINDS = (["TPU v4"] * 3, ["cpu"] * 2)
MODEL = ModelConfig(vocabulary_size=11, width=8, layers=6, heads=2, kv_heads=1, ffn_width=12)


def topologies(*, in_one_jax: bool, **network: Any) -> list[Topology]:
    """What each host makes of the run."""
    config = Config(model=MODEL, network=NetworkConfig(**network))
    return [
        Topology.of(config, PLAN, host, HOST_OF, KINDS, in_one_jax=in_one_jax) for host in range(2)
    ]


def test_a_node_is_on_a_device_of_its_host_which_other_hosts_know_by_name():
    assert devices_of_nodes(HOST_OF, KINDS, [ONE_DEVICE] * 5) == (
        (Device(0, 0, "TPU v4"),),
        (Device(0, 1, "TPU v4"),),
        (Device(1, 0, "cpu"),),
        (Device(1, 1, "cpu"),),
        (Device(1, 0, "cpu"),),
    )


def test_hosts_with_devices_that_no_node_uses_are_named():
    kinds = [["gpu", "gpu"], ["gpu"], ["gpu", "gpu"]]
    [warning] = unused_devices_warnings((0, 1, 2, 2), kinds, [ONE_DEVICE] * 4)
    assert warning.startswith("host 0 uses 1 of its 2 devices. Set node: auto to use all")
    assert unused_devices_warnings((0, 1, 2, 2), kinds, [None] * 4) == []


def test_nodes_of_like_devices_on_different_hosts_hold_replicas_of_their_own():
    # Each host's own JAX gives the same name to its first device.
    plan = plan_of([[0, 1, 2]], [[0], [1], [2]])
    topology = Topology.of(Config(model=MODEL), plan, 0, (0, 1, 2), [["cpu"]] * 3)
    assert topology.replicas == ((0, 1, 2),)
    assert topology.rings[0].nodes == (0, 1, 2)


def test_messages_name_hosts_by_their_ids():
    """In a later generation, the rank of a host is no longer its id."""
    kinds, host_ids = [["cpu"]] * 3, (1, 4, 6)
    plan = plan_of([[0, 1, 2]], [[0], [1], [2]])
    topology = Topology.of(Config(model=MODEL), plan, 1, (0, 1, 2), kinds, host_ids=host_ids)
    assert topology.node_text(2) == "node 2 on host 6"
    assert topology.others_text() == "host 1, 6"


@pytest.mark.parametrize("in_one_jax", [False, True])
def test_only_within_one_jax_do_collectives_sum_over_hosts(in_one_jax: bool):
    for topology in topologies(in_one_jax=in_one_jax):
        # What one host has for itself needs no ring, for whoever looks.
        assert list(topology.rings) == ([] if in_one_jax else [1])


@pytest.mark.parametrize(
    ("host_of", "chunk_bytes"), [((0, 1, 0, 1), 40_000), ((0, 1, 2, 3), 2**19)]
)
def test_a_ring_is_cut_smaller_where_hops_take_the_same_links(
    host_of: tuple[int, ...], chunk_bytes: int
):
    """Hosts of one node each send their like nothing but the ring."""
    bandwidth = 2e6 / GIBIBYTE
    links = [["near", "far", 0.0, bandwidth], ["far", "near", 0.0, bandwidth]]
    stages, paths = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    plan = plan_of(stages, paths, locations=["near", "far"], links=links, activation_bytes=1e5)
    # The stages have a block each, of 4 MB.
    model = ModelConfig(vocabulary_size=8, width=256, layers=2, heads=4, kv_heads=4, ffn_width=1024)
    config = Config(model=model)
    topology = Topology.of(config, plan, 0, host_of, [["cpu"]] * 4)
    assert 4 * topology.rings[1].chunk_length == pytest.approx(chunk_bytes, rel=0.1)


def test_a_host_has_its_own_devices_whatever_its_number():
    """To its own JAX every host is process 0."""
    local = jax.local_devices()
    first, second = topologies(in_one_jax=False)
    assert [first.device(node) for node in first.nodes] == local[:2]
    assert [second.device(node) for node in second.nodes] == [local[0], local[1], local[0]]
    assert second.host_device == local[0]
    # Not taken for one of its own.
    with pytest.raises(KeyError):
        second.device(0)


def test_collectives_that_reach_no_other_host_are_refused(tmp_path: Any):
    network = NetworkConfig(averaging="collective")
    config = Config(run_dir=str(tmp_path / "run"), model=MODEL, network=network)
    one_of_two = Membership(ClusterConfig(), 1, 2)
    with pytest.raises(InputError, match=r"network\.averaging = 'collective'.*Set auto or ring"):
        Trainer(config, host=one_of_two).setup()
    assert not (tmp_path / "run").exists()
