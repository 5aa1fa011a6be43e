"""Meshes of nodes: what is asked for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.node_subset import with_nodes

from skippipe_jax.config import NodeMesh, parse_config
from skippipe_jax.runtime.topology import devices_of_nodes, require_meshes
from tests.harness.messages import refusal

MODEL = {"vocabulary_size": 260, "width": 16, "layers": 2, "context": 32}
MODEL |= {"heads": 4, "kv_heads": 2, "ffn_width": 24}
DATA = {"sequence_length": 32, "microbatch_size": 2}
CASE = {
    "locations": ["Belgium"],
    "links": "gcp12",
    "activation_bytes": 1e5,
    "stage_bytes": 1e5,
    "forward_s": 0.1,
    "memory": 2,
    "stages": [2, 1],
    "path_length": 2,
    "microbatches_per_data_node": 1,
}


def case_of(*meshes: Any) -> Any:
    return parse_case(CASE | {"nodes": [{"mesh": own} if own else {} for own in meshes]})


def config_of(node: Any, **changes: Any) -> Any:
    return parse_config({"model": MODEL, "data": DATA, "node": node} | changes)


def test_nodes_have_their_own_mesh_or_that_of_all():
    case = case_of({"fsdp": 2}, None, {"fsdp": 1, "tensor": 2})
    assert config_of({"tensor": 4, "fsdp": 1} | {"tensor": 2}).node.meshes(case) == [
        NodeMesh(2, 1),
        NodeMesh(1, 2),
        NodeMesh(1, 2),
    ]
    assert config_of("auto").node.meshes(case) == [NodeMesh(2, 1), None, NodeMesh(1, 2)]
    fewer = with_nodes(case, [0, 2], [1, 1], [1])
    assert [node.mesh for node in fewer.nodes] == [(2, 1), (1, 2)]


def test_a_host_has_devices_for_its_nodes_in_turn():
    meshes = [NodeMesh(2, 2), NodeMesh(1, 2), NodeMesh(2, 1), NodeMesh(2, 2)]
    devices = devices_of_nodes([0, 1, 0, 1], [["cpu"] * 8, ["cpu"] * 6], meshes)
    assert [[device.number for device in own] for own in devices] == [
        [0, 1, 2, 3],
        [0, 1],
        [4, 5],
        [2, 3, 4, 5],
    ]
    shared = devices_of_nodes([0, 0], [["cpu"] * 6], [None, None])
    assert [len(own) for own in shared] == [3, 3]
    assert config_of({"fsdp": None, "tensor": 2}).node.over(6) == NodeMesh(3, 2)
    with pytest.raises(InputError, match="does not divide the 3 devices"):
        config_of({"fsdp": None, "tensor": 2}).node.over(3)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_mesh_that_devices_do_not_fill_is_refused(devices: int):
    with pytest.raises(InputError, match=rf"of host 0, which has {devices}") as refused:
        devices_of_nodes([0, 0], [["cpu"] * devices], [NodeMesh(1, 2), NodeMesh(4, 1)])
    assert refused.value.field == "node"


@pytest.mark.parametrize(
    ("named", "size", "changes", "problem"),
    [
        ("tensor", 4, {}, "model.kv_heads = 2"),
        ("tensor", 3, {}, "model.heads = 4"),
        ("tensor", 2, {"model": MODEL | {"ffn_width": 25}}, "model.ffn_width = 25"),
        ("tensor", 2, {"model": MODEL | {"vocabulary_size": 259}}, "model.vocabulary_size = 259"),
        ("tensor", 2, {"data": DATA | {"sequence_length": 31}}, "data.sequence_length = 31"),
        ("fsdp", 3, {}, "model.width = 16"),
        ("fsdp", 4, {"data": DATA | {"sequence_length": 30}}, "or its product"),
    ],
)
def test_what_does_not_divide_is_refused(
    named: str, size: int, changes: dict[str, Any], problem: str
):
    with refusal(f"node.{named} = {size}...{problem}"):
        config_of({named: size}, **changes)
    config = config_of({}, **changes)
    with refusal(f"case.nodes[1].mesh.{named} = {size}...{problem}"):
        require_meshes(config, case_of(None, {named: size}, None))


@pytest.mark.parametrize("node", [{"fsdp": 0}, {"tensor": 0}, {"gather": "never"}, {"pipe": 2}, 4])
def test_what_is_no_mesh_is_refused(node: Any):
    with refusal("node"):
        config_of(node)
    with refusal("case.nodes[0].mesh"):
        case_of(node, None, None)


def test_outer_averaging_is_for_nodes_of_one_device():
    config = config_of({}, averaging={"mode": "outer", "every": 2, "fragments": 1})
    with pytest.raises(InputError, match="requires nodes of one device, and node 2 has 2"):
        require_meshes(config, case_of(None, None, {"fsdp": 2}))
