"""Scenes of up to five shapes on a 3x3 grid, drawn as RGBA pictures of 256 px.

Drawing is a copy of a cached background and one blend a shape: well under 0.5 ms a picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from .outlines import SHAPES, outline

SIDE = 256
"""Width and height of a picture, px."""
CENTRES = (43, 128, 213)
"""Where the three rows and columns of cells have their middle, px."""
MOST_ITEMS = 5

COLOURS = {
    "red": (215, 25, 30),
    "green": (15, 135, 45),
    "blue": (30, 70, 215),
    "yellow": (250, 212, 0),
    "purple": (130, 30, 170),
    "orange": (245, 115, 10),
    "black": (20, 20, 20),
}
"""Object colours, RGB of 0..255."""
TINTS = {
    "white": ((255, 255, 255), (215, 215, 215)),
    "grey": ((190, 190, 190), (150, 150, 150)),
    "blue": ((150, 200, 255), (112, 165, 232)),
    "green": ((150, 240, 150), (112, 205, 112)),
    "pink": ((255, 195, 215), (220, 150, 175)),
    "yellow": ((255, 250, 185), (235, 218, 135)),
}
"""Background colours: main tone and the second tone of its patterns, RGB of 0..255."""
BACKGROUNDS = (*TINTS, "transparent")
PATTERNS = ("plain", "striped", "dotted", "checkered")
RADII = {"small": (22, 25), "large": (34, 38)}
"""Smallest and largest radius of each size, px."""
JITTER = {"small": 5, "large": 2}
"""How far an item of each size may lie from its cell's middle, px; large ones must not touch."""
SIZES = tuple(RADII)

_PERIOD = 32
_DOT = 8


@dataclass(frozen=True, slots=True)
class Item:
    """One shape of a scene.

    Parameters
    ----------
    shape, colour, size
        Of `SHAPES`, `COLOURS` and `SIZES`.
    cell
        Row and column on the grid, each 0..2.
    radius
        Half the extent of the shape, px, within ``RADII[size]``.
    offset
        Down and right of the cell's middle, px, each at most ``JITTER[size]`` either way.
    """

    shape: str
    colour: str
    size: str
    cell: tuple[int, int]
    radius: int
    offset: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.shape not in SHAPES or self.colour not in COLOURS or self.size not in RADII:
            raise ValueError(f"no such item: {self.size} {self.colour} {self.shape}")
        low, high = RADII[self.size]
        if not low <= self.radius <= high:
            raise ValueError(f"radius {self.radius} of a {self.size} item: {low} to {high} px")
        if max(map(abs, self.offset)) > JITTER[self.size]:
            raise ValueError(f"offset {self.offset}: at most {JITTER[self.size]} px either way")
        if min(self.cell) < 0 or max(self.cell) > 2:
            raise ValueError(f"cell {self.cell}: row and column are 0 to 2")

    @property
    def centre(self) -> tuple[int, int]:
        """Row and column of the middle, px."""
        return CENTRES[self.cell[0]] + self.offset[0], CENTRES[self.cell[1]] + self.offset[1]


@dataclass(frozen=True, slots=True)
class Background:
    """What lies behind the items: one of `BACKGROUNDS`, in one of `PATTERNS`."""

    colour: str
    pattern: str = "plain"

    def __post_init__(self) -> None:
        if self.colour not in BACKGROUNDS or self.pattern not in PATTERNS:
            raise ValueError(f"no such background: {self.colour} {self.pattern}")
        if self.colour == "transparent" and self.pattern != "plain":
            raise ValueError("a transparent background has no pattern")


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows: at most `MOST_ITEMS` items in distinct cells, and a background."""

    items: tuple[Item, ...]
    background: Background

    def __post_init__(self) -> None:
        if len(self.items) > MOST_ITEMS:
            raise ValueError(f"{len(self.items)} items: at most {MOST_ITEMS}")
        if len({item.cell for item in self.items}) < len(self.items):
            raise ValueError("two items in one cell")


@cache
def second_tone(pattern: str) -> np.ndarray:
    """Share of the second tone at each pixel, float32 (256, 256) of 0..1; read-only."""
    y, x = np.mgrid[:SIDE, :SIDE]
    if pattern == "plain":
        share = np.zeros((SIDE, SIDE))
    elif pattern == "striped":
        share = x % _PERIOD >= _PERIOD // 2
    elif pattern == "checkered":
        share = (x // _PERIOD + y // _PERIOD) % 2
    else:
        middle = (_PERIOD - 1) / 2
        distance = np.hypot(x % _PERIOD - middle, y % _PERIOD - middle)
        share = np.clip(_DOT + 0.5 - distance, 0, 1)
    share = np.asarray(share, np.float32)
    share.flags.writeable = False
    return share


@cache
def ground(background: Background) -> np.ndarray:
    """The background alone, uint8 RGBA (256, 256, 4); read-only."""
    picture = np.full((SIDE, SIDE, 4), 255, np.uint8)
    if background.colour == "transparent":
        picture[..., 3] = 0
    else:
        first, second = (np.array(tone, np.float32) for tone in TINTS[background.colour])
        share = second_tone(background.pattern)[..., None]
        picture[..., :3] = np.rint(first + (second - first) * share)
    picture.flags.writeable = False
    return picture


@cache
def mask(shape: str, radius: int) -> np.ndarray:
    """Coverage of a shape, uint16 (2 * radius + 2,) * 2 of 0..256, its middle in the middle."""
    coverage = (outline(shape, radius).astype(np.uint16) * 256 + 127) // 255
    coverage.flags.writeable = False
    return coverage


@cache
def _opaque(shape: str, radius: int, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """What stays of the background, and what the colour adds (rounding included), in 1/256."""
    coverage = mask(shape, radius)[..., None]
    colours = np.array((*COLOURS[colour], 255), np.uint16)
    # Four equal channels: broadcasting over a last axis of one is much slower than reading them.
    return np.repeat(256 - coverage, 4, axis=2), coverage * colours + np.uint16(128)


@cache
def _cut_out(shape: str, radius: int, colour: str) -> np.ndarray:
    """The shape with straight alpha, white where alpha is 0."""
    coverage = mask(shape, radius)
    cut = np.full((*coverage.shape, 4), 255, np.uint8)
    cut[..., 3] = np.minimum(coverage, 255)
    cut[coverage > 0, :3] = COLOURS[colour]
    return cut


def draw(scene: Scene) -> np.ndarray:
    """Draw a scene.

    Returns
    -------
    numpy.ndarray
        uint8 RGBA (256, 256, 4), alpha straight: 255 everywhere, or, on a transparent
        background, the coverage of the items, with white where it is 0.
    """
    picture = ground(scene.background).copy()
    transparent = scene.background.colour == "transparent"
    for item in scene.items:
        reach = item.radius + 1
        y, x = item.centre
        part = picture[y - reach : y + reach, x - reach : x + reach]
        if transparent:
            # Nothing to blend with: cells and jitter keep the squares of two items apart.
            part[:] = _cut_out(item.shape, item.radius, item.colour)
        else:
            stays, adds = _opaque(item.shape, item.radius, item.colour)
            blend = stays * part
            blend += adds
            blend >>= 8
            part[:] = blend
    return picture


def picture(scene: Scene) -> Image.Image:
    """`draw` as a Pillow picture in mode RGBA."""
    return Image.fromarray(draw(scene))
