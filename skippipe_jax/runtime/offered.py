"""Which hops of an iteration this host may be asked for by which other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.topology import Topology


def offered(topology: Topology, programs: Iterable[Program]) -> Mapping[int, set[int]]:
    """List the numbers of the hops from here to each other host, by any of its `programs`.

    Those of copies are among them, wherever they go.
    """
    numbers: defaultdict[int, set[int]] = defaultdict(set)

    def add(hop: Hop) -> None:
        if topology.is_here(hop.source) and not topology.is_here(hop.target):
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
