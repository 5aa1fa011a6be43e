"""What one host has told the others by name, as far as they keep it.

Much of it few will ask for, and some nobody: what a host tells, all others are told.
"""

from __future__ import annotations

MOST_VALUES = 10_000
MOST_CHARACTERS = 1 << 23
"""So many values of one host, and so long all together, may wait to be asked for. The oldest of
that host go for those that are more, since nobody has wanted them for long."""


class Told:
    """Values by their keys, the oldest first.

    Attributes:
        values: see there.
    """

    def __init__(self):
        """Begin with nothing."""
        self.values: dict[str, str] = {}
        self._characters = 0

    def put(self, key: str, value: str) -> None:
        """Add a value, in place of an earlier one of the same key."""
        self.drop(key)
        self.values[key] = value
        self._characters += len(key) + len(value)
        while self._characters > MOST_CHARACTERS or len(self.values) > MOST_VALUES:
            self.drop(next(iter(self.values)))

    def drop(self, key: str) -> None:
        """Take a value away, if it is there."""
        value = self.values.pop(key, None)
        if value is not None:
            self._characters -= len(key) + len(value)
