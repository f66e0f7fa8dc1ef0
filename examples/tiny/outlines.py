"""The shapes as polygons, rasterised with soft edges; letters are drawn here, not from a font."""

from __future__ import annotations

from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

Polygon = list[tuple[float, float]]

_FINE = 8
_HOLE = 0.54


def _around(corners: int, radii: tuple[float, ...]) -> Polygon:
    """Corners at equal angles from the top, clockwise, at the radii in turn."""
    turns = ((2 * pi * k / corners, radii[k % len(radii)]) for k in range(corners))
    return [(r * sin(angle), -r * cos(angle)) for angle, r in turns]


def _heart() -> Polygon:
    points = []
    for k in range(72):
        t = 2 * pi * k / 72
        x = 16 * sin(t) ** 3
        y = 13 * cos(t) - 5 * cos(2 * t) - 2 * cos(3 * t) - cos(4 * t)
        points.append((x / 16, -(y + 2.5) / 15.2))
    return points


def _bars(*bars: tuple[float, float, float, float]) -> list[Polygon]:
    """Rectangles of left, top, right, bottom."""
    return [[(a, b), (c, b), (c, d), (a, d)] for a, b, c, d in bars]


_OUTLINES: dict[str, list[Polygon]] = {
    "circle": [_around(96, (1.0,))],
    "square": _bars((-0.86, -0.86, 0.86, 0.86)),
    "triangle": [[(0, -0.95), (1, 0.8), (-1, 0.8)]],
    "star": [[(x, y + 0.06) for x, y in _around(10, (1.0, 0.43))]],
    "cross": _bars((-0.32, -0.96, 0.32, 0.96), (-0.96, -0.32, 0.96, 0.32)),
    "diamond": [[(0, -1), (0.74, 0), (0, 1), (-0.74, 0)]],
    "heart": [_heart()],
    "ring": [_around(96, (1.0,))],
    "letter L": _bars((-0.6, -0.95, -0.15, 0.95), (-0.6, 0.5, 0.65, 0.95)),
    "letter T": _bars((-0.8, -0.95, 0.8, -0.5), (-0.225, -0.95, 0.225, 0.95)),
    "letter H": _bars(
        (-0.75, -0.95, -0.3, 0.95), (0.3, -0.95, 0.75, 0.95), (-0.75, -0.22, 0.75, 0.22)
    ),
    "letter E": _bars(
        (-0.62, -0.95, -0.17, 0.95),
        (-0.62, -0.95, 0.68, -0.57),
        (-0.62, -0.19, 0.55, 0.19),
        (-0.62, 0.57, 0.68, 0.95),
    ),
}
"""Polygons whose union is the shape; x to the right and y down, within the unit square +-1."""

SHAPES = tuple(_OUTLINES)


def outline(shape: str, radius: int) -> np.ndarray:
    """Rasterise a shape.

    Parameters
    ----------
    shape
        One of `SHAPES`.
    radius
        px that one unit of the polygons takes.

    Returns
    -------
    numpy.ndarray
        Coverage, uint8 (2 * radius + 2, 2 * radius + 2) of 0..255.
    """
    side = 2 * radius + 2
    fine = Image.new("L", (side * _FINE, side * _FINE), 0)
    pen = ImageDraw.Draw(fine)
    for polygon in _OUTLINES[shape]:
        _fill(pen, polygon, radius, 255)
    if shape == "ring":
        _fill(pen, [(x * _HOLE, y * _HOLE) for x, y in _OUTLINES[shape][0]], radius, 0)
    return np.asarray(fine.reduce(_FINE))


def _fill(pen: ImageDraw.ImageDraw, polygon: Polygon, radius: int, value: int) -> None:
    # Pillow counts pixels by their middle, hence the half.
    points = [
        ((x * radius + radius + 1) * _FINE - 0.5, (y * radius + radius + 1) * _FINE - 0.5)
        for x, y in polygon
    ]
    pen.polygon(points, fill=value)
