"""Elements of pictures: SVG that needs no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree

# Pixels. The picture has the width of a README's text, so that it is shown at its own size.
WIDTH = 900
MARGIN = 16
TITLE_Y = 32
# Width of a character of a label, in the widest of the fonts of SHARED_STYLE.
CHARACTER = 6.2
HALF_DIGIT_HEIGHT = 3
MOST_TICKS = 12

# SCOPE is the class of the picture. Every rule has it, because a picture inlined in a page (a
# notebook) shares the page's styles.
SHARED_STYLE = """
.SCOPE text{font:11px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#3d4450}
.SCOPE .paper{fill:#fff;stroke:#d5d9e0}
.SCOPE .band{fill:#f4f6f9}
.SCOPE .title{font-size:15px;font-weight:600;fill:#171b22}
.SCOPE .figures{font-size:12px;font-weight:400;fill:#3d4450}
.SCOPE .stage{font-weight:600;fill:#171b22}
.SCOPE .end{text-anchor:end}
.SCOPE .middle{text-anchor:middle}
.SCOPE .grid{stroke:#dde1e8}
"""


class Shape(ElementTree.Element):
    """Element of a picture, to which methods add others. Coordinates are in pixels."""

    def add(self, tag: str, attributes: Mapping[str, str] | None = None) -> Shape:
        """Add an element of any kind, and return it, as all methods that add one do."""
        shape = Shape(tag, dict(attributes or {}))
        self.append(shape)
        return shape

    def add_title(self, title: str, figures: str) -> None:
        """Add the line at the top: the title, and next to it the main figures."""
        text = self.add_text("title", MARGIN, TITLE_Y, title)
        text.add("tspan", {"class": "figures", "dx": "10"}).text = figures

    def add_rect(
        self,
        classes: str,
        across: tuple[float, float],
        down: tuple[float, float],
        radius: int = 0,
    ) -> Shape:
        """Add a rectangle from left to right and from top to bottom."""
        attributes = {
            "class": classes,
            "x": rounded(across[0]),
            "y": rounded(down[0]),
            "width": rounded(across[1] - across[0]),
            "height": rounded(down[1] - down[0]),
        }
        return self.add("rect", attributes | ({"rx": str(radius)} if radius else {}))

    def add_line(
        self, classes: str, start: tuple[float, float], end: tuple[float, float], width: float = 0
    ) -> Shape:
        """Add a line; `width` 0 leaves its width to the style."""
        names = ("x1", "y1", "x2", "y2")
        places = dict(zip(names, map(rounded, (*start, *end)), strict=True))
        stroke = {"stroke-width": rounded(width)} if width else {}
        return self.add("line", {"class": classes, **places, **stroke})

    def add_circle(self, classes: str, x: float, y: float, radius: float) -> Shape:
        """Add a circle around x and y."""
        places = {"cx": rounded(x), "cy": rounded(y), "r": rounded(radius)}
        return self.add("circle", ({"class": classes} if classes else {}) | places)

    def add_text(self, classes: str, x: float, y: float, content: str) -> Shape:
        """Add a text whose baseline begins at x and y, or is anchored there by its class."""
        attributes = {"class": classes} if classes else {}
        text = self.add("text", {**attributes, "x": rounded(x), "y": rounded(y)})
        text.text = content
        return text

    def add_ticks(self, labels: Mapping[float, str], top: float, bottom: float) -> None:
        """Add a line of the grid at each x, and its label below the plot."""
        for x, label in labels.items():
            self.add_line("grid", (x, top), (x, bottom + 4))
            self.add_text("middle", x, bottom + 17, label)

    def add_tip(self, content: str) -> None:
        """Add a tooltip."""
        self.add("title").text = content

    def to_text(self) -> str:
        """Return the picture as the text of its file."""
        return ElementTree.tostring(self, encoding="unicode") + "\n"


def start_picture(scope: str, size: tuple[float, float], about: str, styles: str) -> Shape:
    """Start an SVG of this size [pixels], with its paper and styles; `scope` is its class."""
    width, height = size
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": scope,
        "width": rounded(width),
        "height": rounded(height),
        "viewBox": f"0 0 {rounded(width)} {rounded(height)}",
        "role": "img",
        "aria-label": about,
    }
    svg = Shape("svg", attributes)
    svg.add("style").text = SHARED_STYLE.replace("SCOPE", scope) + styles
    svg.add_rect("paper", (0.5, width - 0.5), (0.5, height - 0.5), radius=8)
    return svg


def rounded(value: float) -> str:
    """Format a coordinate to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def round_ticks(end: float, start: float = 0.0, most: int = MOST_TICKS) -> list[float]:
    """List round numbers from `start` to `end`, at most `most` + 1 of them."""
    span = end - start
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * most >= span)
    return [step * index for index in range(math.ceil(start / step), math.floor(end / step) + 1)]


def shortened(text: str, longest: int) -> str:
    """Shorten a text to at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def point(place: Iterable[float]) -> str:
    """Format coordinates for paths and polygons."""
    return " ".join(map(rounded, place))
