"""Reading cases: what every field means, links from each kind of table, cases whole in plans."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Node, Rules, load_case, parse_case
from skippipe_sched.problem.links import BUILT_IN, COLUMNS, GIBIBYTE, Link, LinkTable, table
from skippipe_sched.problem.node_subset import with_nodes
from skippipe_sched.problem.open_case import candidates
from skippipe_sched.problem.rules import fair_shares

from tests.harness.messages import refusal
from tests.sched.examples import PAPER, TWO_NODES, case_with

HEADER = ",".join(COLUMNS)


def test_the_paper_case():
    case = load_case(Path(PAPER))
    assert len(case.nodes) == 20
    places = [case.nodes[n].location for n in (0, 11, 12, 19)]
    assert places == ["Belgium", "Australia", "Belgium", "Oregon"]
    assert case.stages == (5, 3, 3, 3, 3, 3)
    assert case.microbatches == (6,) * 5
    assert case.rules == Rules(max_swaps=2, max_swap_distance=1, max_jump=4)
    assert {(node.forward_s, node.memory) for node in case.nodes} == {(0.44, 3)}
    assert case.duration("F", 0, 0) == 0.44
    assert case.duration("L", 0, 0) == pytest.approx(0.11)
    assert case.duration("B", 0, 0) == pytest.approx(0.66)
    # Belgium to Canada as the table has it, and back the same.
    latency, bandwidth = case.link_matrices
    hop = latency[0, 1] + 33554432 / bandwidth[0, 1] + 0.35
    assert case.forward_hop_s[0, 1] == case.forward_hop_s[1, 0] == pytest.approx(hop)
    # Nodes 0 and 12 share Belgium: 1 ms, 32 MiB at 2 GiB/s, and the overhead.
    assert case.forward_hop_s[0, 12] == pytest.approx(0.001 + 1 / 64 + 0.35)
    assert not case.forward_hop_s.diagonal().any()
    # A case that says nothing of gradients has them travel as activations do.
    assert np.array_equal(case.backward_hop_s, case.forward_hop_s)
    assert np.array_equal(case.round_trip_s, 2 * case.forward_hop_s)


def test_a_bandwidth_factor_slows_every_link_but_not_its_latency():
    given = {"links": [["here", "there", 250, 0.5]], "activation_bytes": 2**30}
    assert case_with(**given).forward_hop_s[0, 1] == 0.25 + 2
    case = case_with(**given, bandwidth_factor=0.5)
    assert case.forward_hop_s[0, 1] == case.backward_hop_s[0, 1] == 0.25 + 4
    assert case.link_table.same_location == Link(0.001, GIBIBYTE)
    assert parse_case(dict(case.source)).link_table == case.link_table


def test_a_gradient_takes_as_long_as_its_own_bytes():
    links = [["here", "there", 250, 0.5], ["there", "here", 500, 1]]
    case = case_with(links=links, activation_bytes=2**30, gradient_bytes=2**28, hop_overhead_s=2)
    assert case.forward_hop_s.tolist() == [[0, 2.25 + 2], [2.5 + 1, 0]]
    assert case.backward_hop_s.tolist() == [[0, 2.25 + 0.5], [2.5 + 0.25, 0]]
    # There with an activation, and back with its gradient.
    assert case.round_trip_s.tolist() == [[0, 4.25 + 2.75], [3.5 + 2.75, 0]]
    for kind, size, seconds in (("F", 2**30, 4.25), ("L", 2**30, 4.25), ("B", 2**28, 2.75)):
        assert (case.hop_bytes(kind), case.hop_duration(kind, 0, 1)) == (size, seconds)


@pytest.mark.parametrize(("total", "sent"), [(3, (1, 1, 1)), (8, (3, 3, 2)), (10, (4, 3, 3))])
def test_a_total_of_microbatches_is_spread_over_the_data_nodes(total, sent):
    given = {key: TWO_NODES[key] for key in TWO_NODES if key != "microbatches_per_data_node"}
    case = parse_case(given | {"nodes": 4, "stages": [3, 1], "microbatches": total})
    assert case.microbatches == sent
    assert parse_case(dict(case.source)).microbatches == sent


def test_defaults():
    required = {key: value for key, value in TWO_NODES.items() if not key.endswith("_ratio")}
    case = parse_case(required)
    assert (case.backward_ratio, case.loss_ratio, case.hop_overhead_s) == (1.5, 0.25, 0)
    assert case.contention == "link"
    assert case.rules == Rules(max_swaps=0, max_swap_distance=1, max_jump=2)
    assert case.link_table.same_location == Link(0.001, 2 * GIBIBYTE)


def test_nodes_override_what_the_case_gives_for_all():
    case = case_with(
        nodes=[{"location": "there", "memory": 5}, {}, {"forward_s": 3}],
        stages=[2, 1],
        microbatches_per_data_node=[4, 1],
    )
    # Locations are cycled by the index of the node, also past nodes that have their own.
    assert case.nodes == (Node("there", 1, 5), Node("there", 1, 2), Node("here", 3, 2))
    assert case.microbatches == (4, 1)


# Connections that are shared.


def test_a_node_may_say_its_own_connection_and_the_case_that_of_the_others():
    case = case_with(
        nodes=[{}, {"uplink_GiB_per_s": 0.5, "downlink_Mbit_per_s": 80}],
        contention="node",
        uplink_Mbit_per_s=200,
    )
    assert [node.uplink for node in case.nodes] == [25e6, GIBIBYTE / 2]
    assert [node.downlink for node in case.nodes] == [np.inf, 10e6]
    assert parse_case(dict(case.source)).nodes == case.nodes
    # A node sends no quicker than it receives.
    sending, receiving = case.connection_rates
    assert (sending.tolist(), receiving.tolist()) == ([25e6, 10e6], [np.inf, 10e6])


def test_links_between_locations_are_no_quicker_than_connections():
    case = case_with(
        nodes=[{"uplink_Mbit_per_s": 80}, {"downlink_Mbit_per_s": 40}, {}],
        locations=["here", "there", "here"],
        stages=[1, 2],
        contention="node",
        activation_bytes=10e6,
        hop_overhead_s=0.5,
    )
    there, back, near = (float(case.forward_hop_s[pair]) for pair in ((0, 1), (1, 0), (0, 2)))
    assert (there, back) == (0.5 + 1 + 2, 0.5 + 1 + 2)
    assert near == pytest.approx(0.5 + 0.001 + 10e6 / 2**31)
    assert replace(case, contention="link").link_matrices[1][0, 1] == GIBIBYTE


def test_slow_connections_lessen_the_share_of_visits():
    """Of 1.5 s of a visit a connection takes as much, and another one three times as much."""
    case = case_with(
        nodes=[{}, {"uplink_Mbit_per_s": 80}, {"uplink_Mbit_per_s": 80 / 3}],
        stages=[1, 2],
        locations=["a", "b", "c"],
        links=[["a", "b", 0, 1], ["b", "c", 0, 1], ["c", "a", 0, 1]],
        forward_s=0.5,
        activation_bytes=7.5e6,
        contention="node",
    )
    assert case.visit_load_s[1:].tolist() == pytest.approx([1.5, 4.5])
    assert fair_shares(case, 1, [1, 2], 8) == pytest.approx([6, 2])
    assert fair_shares(replace(case, contention="link"), 1, [1, 2], 8) == [4, 4]


def test_one_row_serves_both_directions_and_two_rows_one_each():
    quick, slow = Link(0.01, GIBIBYTE), Link(0.02, GIBIBYTE / 2)
    same = Link(0, 1)
    one = table([["a", "b", 10, 1]], same)
    assert one.link("a", "b") == one.link("b", "a") == quick
    two = table([["a", "b", 10, 1], ["b", "a", 20, 0.5]], same)
    assert (two.link("a", "b"), two.link("b", "a")) == (quick, slow)
    assert two.link("a", "a") == same
    assert table([["a", "a", 10, 1]], same).link("a", "a") == quick


def test_matrices_follow_the_nodes():
    links = LinkTable({("a", "b"): Link(1, 10), ("b", "a"): Link(2, 20)}, Link(3, 30))
    latency, bandwidth = links.matrices(["b", "a", "b"])
    assert latency.tolist() == [[3, 2, 3], [1, 3, 1], [3, 2, 3]]
    np.testing.assert_array_equal(bandwidth, 10 * latency)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tables_link_all_their_locations(name):
    links = table(name, Link(0.001, 1e9))
    locations = {location for pair in links.links for location in pair}
    assert len(locations) == 12
    for source, target in product(locations, repeat=2):
        assert links.link(source, target).bandwidth > 0


@pytest.mark.parametrize(
    ("latency", "bandwidth", "link"),
    [
        ("latency_ms", "bandwidth_GiB_per_s", Link(0.02, 100 * 2**30)),
        ("latency_s", "bandwidth_Mbit_per_s", Link(20, 12.5e6)),
        ("latency_us", "bandwidth_Gbit_per_s", Link(20e-6, 12.5e9)),
        ("latency_ms", "bandwidth_MB_per_s", Link(0.02, 100e6)),
    ],
)
def test_the_header_of_a_link_table_says_its_units(tmp_path, latency, bandwidth, link):
    """Spaces around cells and empty lines, as in files written by hand, mean nothing."""
    rows = f"location_a,location_b,{latency},{bandwidth}\n\nhere, there, 20, 100 \n,,,\n"
    (tmp_path / "mine.csv").write_text(rows, encoding="utf-8")
    case = parse_case(TWO_NODES | {"links": "mine.csv"}, tmp_path)
    found = case.link_table.link("here", "there")
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.bandwidth == pytest.approx(link.bandwidth)
    assert parse_case(dict(case.source)).link_table == case.link_table


@pytest.mark.parametrize("byte_order_mark", ["", "\N{ZERO WIDTH NO-BREAK SPACE}"])
def test_a_link_table_lies_beside_the_case_and_then_in_the_plan(
    tmp_path, monkeypatch, byte_order_mark
):
    """Relative to the case file, wherever the command runs; some programs write a mark first."""
    folder = tmp_path / "cases"
    folder.mkdir()
    rows = f"{byte_order_mark}{HEADER}\nhere,there,250,0.5\nthere,here,500,1\n"
    (folder / "mine.csv").write_text(rows, encoding="utf-8")
    content = yaml.safe_dump(TWO_NODES | {"links": "mine.csv"})
    (folder / "case.yaml").write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    case = load_case(Path("cases/case.yaml"))
    assert case.forward_hop_s.tolist() == [[0, 0.25], [0.5, 0]]
    (folder / "mine.csv").unlink()
    again = parse_case(json.loads(json.dumps(dict(case.source))))
    assert again.link_table == case.link_table
    assert again.source == case.source


def test_nodes_may_say_the_bytes_of_their_devices_and_need_not():
    case = case_with(nodes=[{"memory_bytes": 1e9}, {}], memory_bytes="24e9")
    assert [node.memory_bytes for node in case.nodes] == [1e9, 24e9]
    assert parse_case(json.loads(json.dumps(dict(case.source)))).nodes == case.nodes
    assert [node.memory_bytes for node in case_with().nodes] == [None, None]
    fewer = with_nodes(case_with(nodes=[{"memory_bytes": 1e9}, {}]), [0, 1], [1, 1], [1])
    assert [node.memory_bytes for node in fewer.nodes] == [1e9, None]
    assert parse_case(dict(fewer.source)).nodes == fewer.nodes


def test_links_of_locations_without_nodes_may_be_missing():
    case_with(locations=["here", "there", "nowhere"])
    with refusal("case.links = 'here to nowhere'"):
        case_with(locations=["here", "nowhere", "there"])


def test_yaml_anchors_and_merged_mappings(tmp_path):
    content = yaml.safe_dump({key: TWO_NODES[key] for key in TWO_NODES if key != "nodes"})
    content += "nodes: [&quick {forward_s: 0.5, memory: 4}, {<<: *quick, memory: 2}]\n"
    (tmp_path / "case.yaml").write_text(content, encoding="utf-8")
    case = load_case(tmp_path / "case.yaml")
    assert case.nodes == (Node("here", 0.5, 4), Node("there", 0.5, 2))


OF_NODES = {"locations": "location", "forward_s": "forward_s", "memory": "memory"}


def test_what_every_node_says_itself_the_case_need_not_say():
    nodes = [
        {"location": "here", "forward_s": 0.5, "memory": 4},
        {"location": "there", "forward_s": 0.25, "memory": 2},
    ]
    given = {key: value for key, value in TWO_NODES.items() if key not in OF_NODES}
    case = parse_case(given | {"nodes": nodes})
    assert case.nodes == (Node("here", 0.5, 4), Node("there", 0.25, 2))
    for key, of_node in OF_NODES.items():
        lacking = [nodes[0], {k: value for k, value in nodes[1].items() if k != of_node}]
        told = f"Add {key}: to case, or {of_node}: to case.nodes[1]"
        with refusal(f"case.{key} = ...1 of 2 nodes do not set it...{told}"):
            parse_case(given | {"nodes": lacking})
    # A plan carries its case, and whoever leaves sizes open may leave out the same.
    assert parse_case(dict(case.source)).nodes == case.nodes
    chosen = candidates(given | {"nodes": nodes, "stages": "auto", "stage_count": 2})
    assert [one.nodes for one in chosen] == [case.nodes]


def test_an_error_is_one_line_whatever_it_holds():
    error = InputError("case.a\nb", "x" * 1000, "tab\there", "é stays, \x1b[31m goes")
    assert str(error).isprintable()
    assert "case.a\\nb = 'xxx" in str(error)
    assert "é stays, \\x1b[31m goes." in str(error)
    assert len(str(error)) < 300
