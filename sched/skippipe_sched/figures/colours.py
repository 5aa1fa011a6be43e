"""Colors of the pictures."""

from __future__ import annotations

import math

import numpy as np

# Hues at this angle in degrees are evenly distributed on the circle, for any number of them.
GOLDEN_ANGLE = 137.508
CONES_FROM_OKLAB = np.array(
    [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.2914855480],
    ]
)
RGB_FROM_CONES = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def microbatch_colours(microbatch: int) -> tuple[str, str]:
    """Return the light and the dark color, as #rrggbb, of a microbatch in every picture.

    Neighbors differ in lightness too, for readers who distinguish few hues.
    """
    hue = 250 + GOLDEN_ANGLE * microbatch
    shade = 0.04 * (microbatch % 3 - 1)
    return oklch(0.82 + shade, 0.095, hue), oklch(0.49 + shade, 0.12, hue)


def oklch(lightness: float, chroma: float, hue: float) -> str:
    """Convert an OKLCH color to #rrggbb: equal lightness looks equally light in every hue."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    linear = (RGB_FROM_CONES @ (CONES_FROM_OKLAB @ [lightness, a, b]) ** 3).clip(0, 1)
    encoded = np.where(linear < 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * value):02x}" for value in encoded)
