"""Reader of SVGs for tests of pictures, and a measured timeline to draw."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from skippipe_sched.timing.timeline import Timeline

LOCATIONS = [
    *("Belgium", "Canada", "Germany", "Iowa", "Japan", "LA", "NL", "Oregon"),
    *("Singapore", "Taiwan", "London", "Australia"),
]


class Picture:
    """The elements of an SVG without its namespace."""

    def __init__(self, svg: str):
        self.root = ElementTree.fromstring(svg)
        for element in self.root.iter():
            element.tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
        self.width, self.height = (number(self.root, name) for name in ("width", "height"))
        self.texts = ["".join(text.itertext()) for text in self.root.iter("text")]

    def marks(self, tag: str, name: str = "") -> list[tuple[ElementTree.Element, str]]:
        """Return elements of this class with a tooltip (a legend has none), and the tooltip."""
        return [
            (element, element.findtext("title", ""))
            for element in self.root.iter(tag)
            if element.find("title") is not None and (not name or name in classes(element))
        ]


def classes(element: ElementTree.Element) -> list[str]:
    return element.get("class", "").split()


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, ""))


def require_alone(svg: str, most_bytes: int, *urls: str) -> None:
    """Check that a picture is small, and needs no other file."""
    assert len(svg.encode()) < most_bytes
    assert not re.search("href|<script", svg)
    assert re.findall(r"url\(([^)]*)\)", svg) == [*urls]


def measured(predicted: Timeline, factor: float) -> Timeline:
    """Return a run's timeline: all as predicted, `factor` times as long, without hops."""

    def longer(own):
        times = {name: factor * s for name, s in vars(own).items() if name.endswith("_s")}
        return replace(own, **times)

    runs, averagings = (tuple(map(longer, own)) for own in (predicted.runs, predicted.averagings))
    return Timeline(predicted.nodes, runs, (), averagings)
