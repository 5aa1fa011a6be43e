"""Broken links between live hosts, and the choice of the hosts to exclude for them.

A host that is gone or stopped is silent to all. If one member misses another one that others still
receive from, their link is broken, and one of the two is excluded until it is repaired. A complaint
is valid once enough beats of its target have arrived since. Nothing more arrives from a lost host,
so complaints about it never become valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

Complaints = Mapping[tuple[int, int], int]
"""Number of beats received here since the complaint, by (complaining host, missed host)."""

BEATS_UNTIL_VALID = 4
"""Beats of the missed host after which a complaint is valid: the link counts as broken."""


def after_beat(complaints: Complaints, source: int, missed: Iterable[int]) -> Complaints:
    """Update the complaints by a beat of `source`, which misses the hosts `missed`."""
    of_source = {(source, other): complaints.get((source, other), 0) for other in missed}
    rest = {
        (host, other): heard + (other == source)
        for (host, other), heard in complaints.items()
        if host != source
    }
    return rest | of_source


def excluded_by(complaints: Complaints, present: Collection[int]) -> frozenset[int]:
    """Choose the present hosts to exclude, so that no link between the others is broken.

    The host with the most broken links is excluded first; in a tie, the larger id.
    """
    cut = {
        frozenset(pair)
        for pair, heard in complaints.items()
        if heard >= BEATS_UNTIL_VALID and set(pair) <= set(present)
    }
    without: set[int] = set()
    while cut:
        links = Counter(host for pair in cut for host in pair)
        most = max(links, key=lambda host: (links[host], host))
        without.add(most)
        cut = {pair for pair in cut if most not in pair}
    return frozenset(without)


def has_broken_link(complaints: Complaints, host: int, others: Collection[int]) -> bool:
    """Return True if a host misses one of the others, or one of them misses it."""
    return any((host, other) in complaints or (other, host) in complaints for other in others)
