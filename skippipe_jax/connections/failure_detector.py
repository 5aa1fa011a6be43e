"""Failure detection by silence, which is counted in heartbeats of the host that listens.

A host that was itself stopped for a while counts only one more beat when it continues, and reads
what the others have sent before it suspects them.
"""

from __future__ import annotations

from collections.abc import Collection

BEATS = 10
"""Heartbeats sent per heartbeat timeout. A host that misses more of them counts as silent."""

BEATS_OF_LINK = BEATS // 3
"""A host that misses more heartbeats is called over a new connection: the old one may be dead."""


class FailureDetector:
    """Failure detector of one host.

    Attributes:
        missed: hosts that are gone, or have been silent for too long.
    """

    def __init__(self):
        """Start with no missed hosts."""
        self.missed: set[int] = set()
        self._silent_beats: dict[int, int] = {}

    def heard(self, host: int) -> bool:
        """Note a message from a host; return True if the host had been missed."""
        self._silent_beats[host] = 0
        was_missed = host in self.missed
        self.missed.discard(host)
        return was_missed

    def miss(self, host: int) -> bool:
        """Note that a host is gone or silent; return True if it was not missed before."""
        is_new = host not in self.missed
        self.missed.add(host)
        return is_new

    def beat(self, hosts: Collection[int]) -> tuple[list[int], list[int]]:
        """Count one more beat; return the hosts to call again, and those silent for too long."""
        for host in hosts:
            self._silent_beats[host] = self._silent_beats.get(host, 0) + 1
        silent = {host: self._silent_beats[host] for host in hosts}
        to_call = [host for host, beats in silent.items() if beats == BEATS_OF_LINK + 1]
        return to_call, [host for host, beats in silent.items() if beats > BEATS]
