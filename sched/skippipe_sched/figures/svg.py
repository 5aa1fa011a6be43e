"""Elements of pictures: SVG that needs no script and no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

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


def start_picture(scope: str, size: tuple[float, float], about: str, styles: str) -> Element:
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
    svg = Element("svg", attributes)
    SubElement(svg, "style").text = SHARED_STYLE.replace("SCOPE", scope) + styles
    add_rect(svg, "paper", (0.5, width - 0.5), (0.5, height - 0.5), radius=8)
    return svg


def add_title(svg: Element, title: str, figures: str) -> None:
    """Add the line at the top: the title, and next to it the main figures."""
    text = add_text(svg, "title", MARGIN, TITLE_Y, title)
    SubElement(text, "tspan", {"class": "figures", "dx": "10"}).text = figures


def svg_text(svg: Element) -> str:
    """Return the picture as the text of its file."""
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def add_rect(
    parent: Element,
    classes: str,
    across: tuple[float, float],
    down: tuple[float, float],
    radius: int = 0,
) -> Element:
    """Add a rectangle from left to right and from top to bottom [pixels]."""
    attributes = {
        "class": classes,
        "x": rounded(across[0]),
        "y": rounded(down[0]),
        "width": rounded(across[1] - across[0]),
        "height": rounded(down[1] - down[0]),
    }
    return SubElement(parent, "rect", attributes | ({"rx": str(radius)} if radius else {}))


def add_line(
    parent: Element,
    classes: str,
    start: tuple[float, float],
    end: tuple[float, float],
    width: float = 0,
) -> Element:
    """Add a line; `width` 0 leaves its width to the style."""
    names = ("x1", "y1", "x2", "y2")
    places = dict(zip(names, map(rounded, (*start, *end)), strict=True))
    stroke = {"stroke-width": rounded(width)} if width else {}
    return SubElement(parent, "line", {"class": classes, **places, **stroke})


def add_ticks(parent: Element, labels: Mapping[float, str], top: float, bottom: float) -> None:
    """Add a line of the grid at each x, and its label below the plot."""
    for x, label in labels.items():
        add_line(parent, "grid", (x, top), (x, bottom + 4))
        add_text(parent, "middle", x, bottom + 17, label)


def add_text(parent: Element, classes: str, x: float, y: float, content: str) -> Element:
    """Add a text whose baseline begins at x and y, or is anchored there by its class."""
    attributes = {"class": classes} if classes else {}
    text = SubElement(parent, "text", {**attributes, "x": rounded(x), "y": rounded(y)})
    text.text = content
    return text


def add_tip(element: Element, content: str) -> None:
    """Add a tooltip to an element."""
    SubElement(element, "title").text = content


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


def add_circle(parent: Element, classes: str, x: float, y: float, radius: float) -> Element:
    """Add a circle around x and y."""
    places = {"cx": rounded(x), "cy": rounded(y), "r": rounded(radius)}
    return SubElement(parent, "circle", ({"class": classes} if classes else {}) | places)


def point(place: Iterable[float]) -> str:
    """Format coordinates for paths and polygons."""
    return " ".join(map(rounded, place))
