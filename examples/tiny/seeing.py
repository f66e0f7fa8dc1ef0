"""What a picture shows, found by looking at its pixels alone.

All is done at half the resolution. Pixels are told apart by their nearest colour, object colours
against background tones; behind them the background is fitted; then each connected part's share of
every pixel, by its own colour and the background's, is compared with every shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .backdrop import grown, look_behind
from .components import components
from .likeness import likest, sharpened
from .scenes import CENTRES, COLOURS, RADII, SIDE, TINTS, Background

UNKNOWN = "unknown"
"""The shape of an item that is like none."""

_HALF = SIDE // 2
_SPECK = 40
"""Parts of fewer half-resolution pixels are dropped; the smallest item has about 150."""
_WIDEST = 44
"""Half-resolution px across which no single item is, even with soft edges."""
_LEAST_LIKENESS = 0.8
_FRAME = 3
_MEDIUM_RADIUS = (RADII["small"][1] + RADII["large"][0]) / 2
_NAMES = tuple(COLOURS)
_OBJECTS = np.array(list(COLOURS.values()), np.float32)
_PALETTE = np.concatenate([_OBJECTS, np.array(list(TINTS.values()), np.float32).reshape(-1, 3)])


@dataclass(frozen=True, slots=True)
class SeenItem:
    """One item that was seen.

    Parameters
    ----------
    shape
        One of `SHAPES`, or `UNKNOWN`.
    colour, size
        The nearest of `COLOURS` and of `SIZES`.
    centre
        Row and column of the centroid, px.
    cell
        Row and column of the grid that the centroid is in.
    score
        Likeness to the best shape, 0..1 (intersection over union, scale and place removed).
    """

    shape: str
    colour: str
    size: str
    centre: tuple[float, float]
    cell: tuple[int, int]
    score: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen; `background` is None where items leave none to be seen."""

    items: list[SeenItem]
    background: Background | None


def see(rgba: np.ndarray) -> Seen:
    """Find the items and the background of a picture.

    Parameters
    ----------
    rgba
        uint8 (256, 256, 4), alpha straight.
    """
    if rgba.shape != (SIDE, SIDE, 4) or rgba.dtype != np.uint8:
        raise ValueError(f"a picture is uint8 ({SIDE}, {SIDE}, 4), not {rgba.dtype} {rgba.shape}")
    rgb, alpha = _halved(rgba)
    if np.count_nonzero(alpha < 0.5) > alpha.size // 2:
        is_object = alpha >= 0.5
        background, behind = Background("transparent"), None
    else:
        rgb = rgb * alpha[..., None] + 255 * (1 - alpha[..., None])
        is_object = _nearest(rgb.reshape(-1, 3), _PALETTE).reshape(_HALF, _HALF) < len(_NAMES)
        background, behind = look_behind(rgb, is_object)
    picture = _Picture(rgb, alpha, is_object, behind)
    items = [
        _item(part, picture)
        for whole in components(is_object)
        for part in _single(whole)
        if len(part) >= _SPECK
    ]
    return Seen(items, background)


@dataclass(frozen=True, slots=True)
class _Picture:
    """Half the resolution: RGB of 0..255, alpha of 0..1, and what they were taken for."""

    rgb: np.ndarray
    alpha: np.ndarray
    is_object: np.ndarray
    behind: np.ndarray | None


def _halved(rgba: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 RGB (128, 128, 3) of 0..255 and alpha (128, 128) of 0..1."""
    rows = rgba[::2].astype(np.uint16) + rgba[1::2]
    half = (rows[:, ::2] + rows[:, 1::2]).astype(np.float32)
    return half[..., :3] / 4, half[..., 3] / (4 * 255)


def _nearest(rgb: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Index of the nearest colour of the palette to each of (n, 3) pixels."""
    # |p - c|^2 less the |p|^2 that all colours of the palette share.
    return np.argmin((palette**2).sum(1) - 2 * (rgb @ palette.T), axis=1)


def _single(part: np.ndarray) -> list[np.ndarray]:
    """Split a part that is too wide for one item along the borders of the cells."""
    y, x = np.divmod(part, _HALF)
    if max(np.ptp(y), np.ptp(x)) < _WIDEST:
        return [part]
    cell = _cell(2 * y + 1) * 3 + _cell(2 * x + 1)
    return [part[cell == k] for k in np.unique(cell)]


def _cell(at: np.ndarray) -> np.ndarray:
    """Row or column of the grid, from px."""
    return np.abs(np.subtract.outer(at, CENTRES)).argmin(-1)


def _item(part: np.ndarray, picture: _Picture) -> SeenItem:
    top, left, inside = _framed(part)
    around = np.s_[top : top + inside.shape[0], left : left + inside.shape[1]]
    # The edges mix with what is behind: the colour is that of the pixels whose neighbours belong.
    core = ~grown(~inside)
    rgb = picture.rgb[around]
    colour = np.median(rgb[core if core.any() else inside], axis=0)
    if picture.behind is None:
        share = picture.alpha[around]
    else:
        behind = picture.behind[around]
        way = colour - behind
        share = ((rgb - behind) * way).sum(-1) / np.maximum((way * way).sum(-1), 1)
    near = grown(grown(inside)) & (inside | ~picture.is_object[around])
    share = np.where(near, sharpened(share), 0).astype(np.float32)
    shape, score, radius, (y, x) = likest(share)
    centre = 2 * (top + y) + 1, 2 * (left + x) + 1
    row, column = _cell(np.array(centre)).tolist()
    return SeenItem(
        shape if score >= _LEAST_LIKENESS else UNKNOWN,
        _NAMES[int(_nearest(colour[None], _OBJECTS)[0])],
        "small" if radius < _MEDIUM_RADIUS else "large",
        centre,
        (row, column),
        score,
    )


def _framed(part: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Top and left of a frame somewhat wider than the part, and which of its pixels belong."""
    y, x = np.divmod(part, _HALF)
    top, left = max(int(y.min()) - _FRAME, 0), max(int(x.min()) - _FRAME, 0)
    bottom, right = min(int(y.max()) + _FRAME, _HALF - 1), min(int(x.max()) + _FRAME, _HALF - 1)
    inside = np.zeros((bottom - top + 1, right - left + 1), bool)
    inside[y - top, x - left] = True
    return top, left, inside
