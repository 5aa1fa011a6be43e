"""How long the place of a host stays empty that is lost again and again.

Whoever takes a place stops all others for as long as its state takes to come. So a place that is
lost again within a minute of being taken is held back: for a second, then for two, four and so on,
up to a minute; one that is kept for longer begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping

QUICKLY_S = 60.0
LONGEST_S = 60.0


class Pauses:
    """The places of a run as one host sees them taken and lost; times by any one clock, in seconds.

    A host that has been there for a while knows more of that than one that has just come.
    """

    def __init__(self):
        """Nobody is there yet."""
        self._processes: Mapping[int, int] | None = None
        self._taken_s: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._until_s: dict[int, float] = {}

    def entered(self, processes: Mapping[int, int], now_s: float) -> None:
        """Note the hosts that there are now, and their processes; the first ones took no place."""
        before = processes if self._processes is None else self._processes
        for host, process in before.items():
            if processes.get(host) != process:
                self._lost(host, now_s)
        for host, process in processes.items():
            if before.get(host) != process:
                self._taken_s[host] = now_s
        self._processes = dict(processes)

    def _lost(self, host: int, now_s: float) -> None:
        taken_s = self._taken_s.pop(host, None)
        if taken_s is None or now_s - taken_s > QUICKLY_S:
            self._times.pop(host, None)
            return
        times = self._times[host] = self._times.get(host, 0) + 1
        # No power of two that floats do not have.
        self._until_s[host] = now_s + min(LONGEST_S, 2.0 ** min(times - 1, 10))

    def pause_s(self, host: int, now_s: float) -> float:
        """Return how long the place of a host is held back from now on."""
        return max(0.0, self._until_s.get(host, now_s) - now_s)
