"""A curve shows every value where it belongs, and stays small."""

from xml.etree import ElementTree

import numpy as np
import pytest

from skippipe_jax.reporting.line_chart import BOTTOM, LEFT, RIGHT, TOP, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def parts(svg: str, tag: str, name: str) -> list[ElementTree.Element]:
    return [
        element
        for element in ElementTree.fromstring(svg).iter(SVG + tag)
        if name in element.get("class", "").split()
    ]


def corners(svg: str, name: str) -> np.ndarray:
    [line] = parts(svg, "polyline", name)
    return np.array(line.get("points", "").split(), float).reshape(-1, 2)


def test_a_short_curve_goes_through_every_value():
    svg = line_chart("Loss", "nats", np.array([1, 2, 4]), np.array([5.0, 3.0, 4.0]), (3.0, 5.0))
    middle = (TOP + BOTTOM) / 2
    expected = [(LEFT, TOP), (LEFT + (RIGHT - LEFT) / 3, BOTTOM), (RIGHT, middle)]
    assert corners(svg, "line") == pytest.approx(np.array(expected), abs=0.01)
    assert not parts(svg, "polyline", "raw")
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(SVG + "text")]
    assert texts[-1] == "Lossnats"
    # No half steps; the values in between.
    assert [text for text in texts if text in "1234"] == ["3", "4", "1", "2", "3", "4"]


def test_what_lies_outside_the_span_is_drawn_on_its_edge():
    svg = line_chart("", "", np.arange(3), np.array([99.0, 1.0, -99.0]), (0.0, 2.0))
    assert corners(svg, "line")[:, 1] == pytest.approx([TOP, (TOP + BOTTOM) / 2, BOTTOM], abs=0.01)


def test_one_value_is_a_dot():
    svg = line_chart("Loss", "nats", np.array([7]), np.array([2.0]), (1.0, 3.0))
    [dot] = parts(svg, "circle", "mean")
    assert (float(dot.get("cx", "")), float(dot.get("cy", ""))) == (LEFT, (TOP + BOTTOM) / 2)


def test_a_long_curve_stays_small_and_keeps_its_extremes():
    values = np.sin(np.arange(100_000) / 50)
    values[70_007] = 5.0
    svg = line_chart("Loss", "nats", np.arange(1, 100_001), values, (-5.0, 5.0))
    assert len(svg) < 30_000
    raw, mean = corners(svg, "raw"), corners(svg, "line")
    highest = raw[raw[:, 1].argmin()]
    assert highest[1] == pytest.approx(TOP, abs=0.01)
    assert highest[0] == pytest.approx(LEFT + 0.7 * (RIGHT - LEFT), abs=2)
    assert mean[:, 1] == pytest.approx(np.full(len(mean), (TOP + BOTTOM) / 2), abs=2)
    assert "mean over 3,333 steps" in svg


def test_the_mean_of_a_level_curve_is_level_to_its_ends():
    svg = line_chart("", "", np.arange(200), np.full(200, 1.5), (1.0, 2.0))
    assert corners(svg, "line")[:, 1] == pytest.approx(np.full(200, (TOP + BOTTOM) / 2), abs=0.01)


def test_a_mark_is_a_level_with_its_name():
    svg = line_chart("", "", np.arange(3), np.ones(3), (0.0, 2.0), ("predicted <1 s", 1.0))
    [mark] = parts(svg, "line", "mark")
    assert float(mark.get("y1", "")) == float(mark.get("y2", "")) == (TOP + BOTTOM) / 2
    [label] = parts(svg, "text", "mark-label")
    assert label.text == "predicted <1 s"
