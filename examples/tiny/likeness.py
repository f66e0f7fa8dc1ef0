"""How like a part of a picture is to each shape, wherever it lies and however large it is."""

from __future__ import annotations

from functools import cache

import numpy as np

from .outlines import SHAPES, outline
from .scenes import RADII

_GRID = 32
_BLUR = 4
_REACH = 2.1
"""Half the width of what is compared, in root mean square distances from the centroid."""


def likest(share: np.ndarray) -> tuple[str, float, float, tuple[float, float]]:
    """Find the shape that a part is most like.

    Parameters
    ----------
    share
        The part's share of each pixel at half the resolution, float32 (height, width) of 0..1,
        not 0 everywhere.

    Returns
    -------
    tuple
        The shape; its likeness (intersection over union, 0..1, scale and place removed); the
        radius in px of the full resolution; the centroid's row and column in `share`.
    """
    sample, spread, centroid = _sampled(share)
    samples, areas, kinds = _templates()
    both = np.minimum(samples, sample).sum(1)
    likeness = both / (areas + sample.sum() - both)
    best = int(likeness.argmax())
    shape, radius_of_one = kinds[best]
    return shape, float(likeness[best]), radius_of_one * spread, centroid


def _sampled(share: np.ndarray) -> tuple[np.ndarray, float, tuple[float, float]]:
    """A part moved to its centroid and scaled to one spread: float32 (1024,) of 0..1.

    The spread (root mean square distance) hardly depends on how thick an outline came out,
    the area would. Also returned: the spread and the centroid, half-resolution px.
    """
    height, width = share.shape
    rows, columns = np.arange(height), np.arange(width)
    by_row, by_column = share.sum(1), share.sum(0)
    area = float(by_row.sum())
    y, x = float(by_row @ rows) / area, float(by_column @ columns) / area
    spread = float((by_row @ (rows - y) ** 2 + by_column @ (columns - x) ** 2) / area) ** 0.5
    spread = max(spread, 0.5)
    steps = (np.arange(_GRID) - (_GRID - 1) / 2) * (2 * _REACH / _GRID * spread)
    framed = np.zeros((height + 2, width + 2), np.float32)
    framed[1:-1, 1:-1] = share
    above, down = _between(y + 1 + steps, height)
    before, right = _between(x + 1 + steps, width)
    bands = framed[above] * (1 - down)[:, None] + framed[above + 1] * down[:, None]
    sample = bands[:, before] * (1 - right) + bands[:, before + 1] * right
    return sample.ravel(), spread, (y, x)


def _between(at: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Index before each place and the share of the next, within ``length + 2`` samples."""
    at = np.clip(at, 0, length + 1)
    before = np.minimum(at.astype(int), length)
    return before, (at - before).astype(np.float32)


@cache
def _templates() -> tuple[np.ndarray, np.ndarray, list[tuple[str, float]]]:
    """Every shape, small and large, sharp and blurred, as `_sampled`.

    Also returned: the sums of the samples; for each, the shape and its px of radius by spread.
    """
    samples, kinds = [], []
    for shape in SHAPES:
        for radii in RADII.values():
            radius = sum(radii) // 2
            drawn = np.pad(outline(shape, radius).astype(np.float32) / 255, 2 * _BLUR)
            half = (drawn[::2, ::2] + drawn[1::2, ::2] + drawn[::2, 1::2] + drawn[1::2, 1::2]) / 4
            # A blurred star is rounder than a star, but not a circle.
            for share in (half, sharpened(_blurred(half))):
                sample, spread, _ = _sampled(share)
                samples.append(sample)
                kinds.append((shape, radius / spread))
    stacked = np.array(samples)
    return stacked, stacked.sum(1), kinds


def sharpened(share: np.ndarray) -> np.ndarray:
    """Shares with edges steeper than the picture's own, which noise and blur make soft."""
    return np.clip(2 * share - 0.5, 0, 1)


def _blurred(share: np.ndarray) -> np.ndarray:
    """With a standard deviation of about 3 px of the full resolution."""
    for _ in range(_BLUR):
        for axis in (0, 1):
            share = (np.roll(share, 1, axis) + 2 * share + np.roll(share, -1, axis)) / 4
    return share
