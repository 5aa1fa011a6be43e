"""Cases with additional nodes, as after a join.

Each new node has a location of its own. A link without a measurement gets the mean of the case's
links: the mean latency, and the bandwidth that gives the mean time per byte. Where the links of a
node share its connection, the connection of a new node has not been measured: each of its
directions gets the bandwidth of the fastest link in that direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.links import DEFAULT_SAME_LOCATION, GIBIBYTE, Link
from skippipe_sched.problem.node_subset import rates_as_keys, with_nodes


@dataclass(frozen=True)
class NewNode:
    """A node to add.

    Attributes:
        location: unique to the node.
        forward_s: as of a case's nodes; None for their mean.
        links_to: measured links from here to other nodes, including other new ones.
        links_from: measured links from other nodes to here.
    """

    location: str
    forward_s: float | None = None
    links_to: Mapping[int, Link] = field(default_factory=dict)
    links_from: Mapping[int, Link] = field(default_factory=dict)


def mean_link(links: Sequence[Link]) -> Link:
    """Average links: the result has the mean latency and the mean time per byte."""
    return Link(
        float(np.mean([link.latency_s for link in links])),
        float(1.0 / np.mean([1.0 / link.bandwidth for link in links])),
    )


def usual_link(case: Case) -> Link:
    """Average the links between the nodes of a case."""
    latency_s, bandwidth = case.pair_matrices
    between = ~np.eye(len(case.nodes), dtype=bool)
    if not between.any():
        return case.link_table.same_location
    return Link(float(latency_s[between].mean()), float(1.0 / (1.0 / bandwidth[between]).mean()))


def with_more_nodes(case: Case, new: Sequence[NewNode]) -> Case:
    """Add nodes to the case, numbered after the existing ones.

    Each has as much memory as the node with the least, and joins the case's last stage; the caller
    places them better when it makes a plan.
    """
    places: dict[str, list[int]] = {}
    for number, node in enumerate(case.nodes):
        places.setdefault(node.location, []).append(number)
    usual = usual_link(case)
    table = {pair: link for pair, link in case.link_table.links.items() if set(pair) <= {*places}}
    for place, own in enumerate(new):
        for location, nodes in places.items():
            links_of_new = own.links_to, own.links_from
            pairs = (own.location, location), (location, own.location)
            for links, pair in zip(links_of_new, pairs, strict=True):
                found = [links[node] for node in nodes if node in links]
                table[pair] = mean_link(found) if found else usual
        for earlier, other in enumerate(new[:place], len(case.nodes)):
            number = len(case.nodes) + place
            forth = own.links_to.get(earlier) or other.links_from.get(number)
            back = own.links_from.get(earlier) or other.links_to.get(number)
            table[own.location, other.location] = forth or usual
            table[other.location, own.location] = back or usual
    same = case.link_table.same_location
    source = dict(with_nodes(case, range(len(case.nodes)), case.stages, case.microbatches).source)
    source.pop("bandwidth_factor", None)
    source["same_location"] = dict(zip(DEFAULT_SAME_LOCATION, _in_table_units(same), strict=True))
    source["links"] = [[*pair, *_in_table_units(link)] for pair, link in table.items()]
    forward_s = float(np.mean([node.forward_s for node in case.nodes]))
    memory = min(node.memory for node in case.nodes)
    source["nodes"] = source["nodes"] + [
        {"location": own.location, "forward_s": own.forward_s or forward_s, "memory": memory}
        | (_connection(own.location, table) if case.shares_connections else {})
        for own in new
    ]
    source["stages"] = [*case.stages[:-1], case.stages[-1] + len(new)]
    return parse_case(source)


def _connection(location: str, table: Mapping[tuple[str, str], Link]) -> dict[str, float]:
    """Describe a connection by the fastest link from a location, and by the fastest to it."""
    bandwidths = [
        [link.bandwidth for pair, link in table.items() if pair[end] == location] for end in (0, 1)
    ]
    return rates_as_keys(*map(max, bandwidths))


def _in_table_units(link: Link) -> tuple[float, float]:
    """Convert a link to the units of tables."""
    return 1e3 * link.latency_s, link.bandwidth / GIBIBYTE
