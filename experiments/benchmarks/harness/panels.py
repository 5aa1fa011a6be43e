"""A panel of a picture: a rectangle with scales, into which curves are drawn."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement

from skippipe_sched.figures.svg import add_line, add_text, point, round_ticks


class Panel:
    """A rectangle of a picture whose sides stand for values.

    Attributes:
        left, right, top, bottom: its sides [pixels].
    """

    def __init__(
        self,
        svg: Element,
        across: tuple[float, float],
        down: tuple[float, float],
        x: tuple[float, float],
        y: tuple[float, float],
    ):
        """Take its sides [pixels], and the values at both ends of each scale, least first."""
        self.svg = svg
        (self.left, self.right), (self.top, self.bottom) = across, down
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        """Return where a value is, from left to right [pixels]."""
        low, high = self._x
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Return where a value is, from top to bottom [pixels]."""
        low, high = self._y
        return self.top + (self.bottom - self.top) * (high - value) / (high - low)

    def label_y(self, most: int = 4) -> None:
        """Draw lines across at round values, and write these on the left."""
        low, high = self._y
        for tick in round_ticks(high, low, most):
            self.across("grid", tick)
            add_text(self.svg, "end", self.left - 7, self.y(tick) + 4, f"{tick:,.10g}")

    def label_x(self, ticks: Iterable[float], shift: float = 0.0) -> None:
        """Write values below the panel, each where the value and `shift` are."""
        for tick in ticks:
            add_text(self.svg, "middle", self.x(tick + shift), self.bottom + 16, f"{tick:,.0f}")

    def curve(self, classes: str, points: Iterable[tuple[float, float]]) -> None:
        """Draw a line through points."""
        corners = " ".join(point((self.x(x), self.y(y))) for x, y in points)
        SubElement(self.svg, "polyline", {"class": classes, "points": corners})

    def across(self, classes: str, value: float) -> None:
        """Draw a line from side to side at a value."""
        add_line(self.svg, classes, (self.left, self.y(value)), (self.right, self.y(value)))

    def down(self, classes: str, value: float) -> None:
        """Draw a line from top to bottom at a value."""
        add_line(self.svg, classes, (self.x(value), self.top), (self.x(value), self.bottom))
