"""What a reader would stumble over in a picture."""

from __future__ import annotations

from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Boxes of text include some air; letters touch when boxes overlap by more.
AIR = 1.0


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts of which one lies on the other, or a text alone that leaves the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    hidden = {label for axis in figure.findobj(Axis) for label in _labels_beyond(axis)}
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden
    ]
    on_paper = figure.bbox.padded(AIR)
    outside = [
        (name, "outside")
        for name, box in boxes
        if not (on_paper.contains(box.x0, box.y0) and on_paper.contains(box.x1, box.y1))
    ]
    return outside + [
        (one, other)
        for (one, a), (other, b) in combinations(boxes, 2)
        if a.padded(-AIR).overlaps(b.padded(-AIR))
    ]


def _labels_beyond(axis: Axis) -> list[Text]:
    """The labels of ticks that lie beyond the ends of an axis, and are not drawn."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    beyond = [tick for tick in ticks if not low <= tick.get_loc() <= high]
    return [label for tick in beyond for label in (tick.label1, tick.label2)]
