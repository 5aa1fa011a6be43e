"""Hops of an iteration that each other host may request from this host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.topology import Topology


def offered(topology: Topology, programs: Iterable[Program]) -> Mapping[int, set[int]]:
    """Return the numbers of the hops from this host to each other host, in any of its `programs`.

    The hops of all buddy checkpoints are included for every host.
    """
    numbers: defaultdict[int, set[int]] = defaultdict(set)

    def add(hop: Hop) -> None:
        if topology.is_local_node(hop.source) and not topology.is_local_node(hop.target):
            numbers[topology.host_of[hop.target]].add(hop.number)

    for program in programs:
        for step in program.instructions:
            if isinstance(step, Compute) and step.leaves is not None:
                add(step.leaves)
    for ring in (*topology.rings.values(), *topology.gatherings.values()):
        for place, number in enumerate(ring.numbers):
            position = place % len(ring.nodes)
            following = ring.nodes[(position + 1) % len(ring.nodes)]
            add(Hop(number, ring.nodes[position], following))
    for other in topology.hosts:
        if other != topology.host:
            totals = topology.totals[topology.host], topology.totals[len(topology.hosts) + other]
            numbers[other] |= {*totals, *topology.copies}
    return numbers
