"""The section `join`: which hosts may come to a run, beside those that it begins with."""

from __future__ import annotations

from dataclasses import dataclass

from skippipe_sched import fields

MOST_PLACES = 1 << 10


@dataclass(frozen=True)
class JoinConfig:
    """Which hosts may come to a run of independent hosts while it lives.

    Attributes:
        places: so many hosts more than the run begins with may be in it; each serves a replica of a
            stage. They cost nothing as long as nobody comes.
        horizon: in so many seconds such a host has to save more time by shorter iterations than the
            others wait for while it gets the state of its stage; else it does not come, unless a
            single host serves the stage.
    """

    places: int = 4
    horizon: float = 3600.0

    def __post_init__(self):
        """Refuse what is no number of hosts, and a time below 0."""
        fields.integer(self.places, "join.places", 0, MOST_PLACES)
        fields.number(self.horizon, "join.horizon", 0.0)
