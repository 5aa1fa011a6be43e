"""Which hosts are heard of: silence is counted in beats of the host that listens.

A host that was itself stopped for a while wakes up with a single beat counted, and reads what the
others have sent before it blames them.
"""

from __future__ import annotations

from collections.abc import Collection

BEATS = 10
"""Heartbeats sent per heartbeat timeout, and how many may stay away before a host is silent."""

BEATS_OF_LINK = BEATS // 3
"""So many may stay away before a host is called by another connection: this one may be dead."""


class Pulse:
    """What one host knows of the others.

    Attributes:
        missed: those that are gone, or have been silent for too long.
    """

    def __init__(self):
        """Nobody is missed."""
        self.missed: set[int] = set()
        self._silent_beats: dict[int, int] = {}

    def heard(self, host: int) -> bool:
        """Something has come from a host; whether it had been missed."""
        self._silent_beats[host] = 0
        was_missed = host in self.missed
        self.missed.discard(host)
        return was_missed

    def miss(self, host: int) -> bool:
        """Note that a host is gone; tell whether that is new."""
        is_new = host not in self.missed
        self.missed.add(host)
        return is_new

    def beat(self, hosts: Collection[int]) -> tuple[list[int], list[int]]:
        """Count one more beat; the hosts to call again, and those that were silent for too long."""
        for host in hosts:
            self._silent_beats[host] = self._silent_beats.get(host, 0) + 1
        silent = {host: self._silent_beats[host] for host in hosts}
        to_call = [host for host, beats in silent.items() if beats == BEATS_OF_LINK + 1]
        return to_call, [host for host, beats in silent.items() if beats > BEATS]
