"""Links between two hosts that both live: who misses whom, and which of them goes without others.

A host that is gone or stopped is silent to all. Where one member misses another that others go on
hearing, it is their link that is cut, and one of the two has to be left out until it is mended. A
complaint counts once the host that it is about has been heard often enough since: of a host that
is lost nothing more comes, and complaints of that kind never count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

Complaints = Mapping[tuple[int, int], int]
"""For who misses whom, how often the one that is missed has been heard of here since."""

ENOUGH = 4
"""So often the one that is missed has to be heard of before its link counts as cut."""


def after_beat(complaints: Complaints, source: int, missed: Iterable[int]) -> Complaints:
    """Return the complaints after a beat of a host that misses these."""
    of_source = {(source, other): complaints.get((source, other), 0) for other in missed}
    rest = {
        (host, other): heard + (other == source)
        for (host, other), heard in complaints.items()
        if host != source
    }
    return rest | of_source


def aside(complaints: Complaints, there: Collection[int]) -> frozenset[int]:
    """Choose which present hosts to do without, so that all others hear one another.

    Whoever has most cut links goes first, and of two with as many the later one.
    """
    cut = {
        frozenset(pair)
        for pair, heard in complaints.items()
        if heard >= ENOUGH and set(pair) <= set(there)
    }
    without: set[int] = set()
    while cut:
        links = Counter(host for pair in cut for host in pair)
        most = max(links, key=lambda host: (links[host], host))
        without.add(most)
        cut = {pair for pair in cut if most not in pair}
    return frozenset(without)


def is_apart(complaints: Complaints, host: int, others: Collection[int]) -> bool:
    """Tell whether a host misses one of the others, or one of them misses it."""
    return any((host, other) in complaints or (other, host) in complaints for other in others)
