"""`scenes.draw` for batches, on the device: thousands of pictures a second, bit for bit the same.

A scene travels as a row of `WIDTH` small numbers instead of 256 KiB of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .outlines import SHAPES
from .scenes import (
    BACKGROUNDS,
    COLOURS,
    MOST_ITEMS,
    PATTERNS,
    RADII,
    SIDE,
    Background,
    Scene,
    ground,
    mask,
)

WIDTH = 1 + 5 * MOST_ITEMS
"""Numbers of a row: background, then mask, colour, radius, row and column of every item."""

_GROUNDS = tuple(
    Background(colour, pattern)
    for colour in BACKGROUNDS
    for pattern in (PATTERNS if colour != "transparent" else PATTERNS[:1])
)
_RADII = tuple(radius for low, high in RADII.values() for radius in range(low, high + 1))
_REACH = max(_RADII) + 1
_NOTHING = len(SHAPES) * len(_RADII)
_SLOT_COLOURS = tuple(COLOURS)
_AT_ONCE = 256


def row(scene: Scene) -> list[int]:
    """A scene in numbers."""
    found = [_GROUNDS.index(scene.background)]
    for item in scene.items:
        index = SHAPES.index(item.shape) * len(_RADII) + _RADII.index(item.radius)
        found += [index, _SLOT_COLOURS.index(item.colour), item.radius, *item.centre]
    return found + [_NOTHING, 0, 0, 0, 0] * (MOST_ITEMS - len(scene.items))


def rows(scenes: Sequence[Scene]) -> torch.Tensor:
    """Scenes in numbers, int16 ``(n, WIDTH)``."""
    return torch.tensor([row(scene) for scene in scenes], dtype=torch.int16)


class Renderer:
    """Draws rows.

    Parameters
    ----------
    device
        Where the pictures are made.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._grounds = torch.from_numpy(np.stack([ground(each) for each in _GROUNDS])).to(device)
        masks = np.zeros((_NOTHING + 1, 2 * _REACH, 2 * _REACH), np.int32)
        for index, (shape, radius) in enumerate((s, r) for s in SHAPES for r in _RADII):
            coverage = mask(shape, radius)
            masks[index, : len(coverage), : len(coverage)] = coverage
        self._masks = torch.from_numpy(masks).to(device).flatten()
        self._colours = torch.tensor(
            [(*rgb, 255) for rgb in COLOURS.values()], dtype=torch.int32, device=device
        )
        self._line = torch.arange(SIDE, device=device)
        self._transparent = torch.tensor(
            [each.colour == "transparent" for each in _GROUNDS], device=device
        )

    @torch.no_grad()
    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """Pictures of rows ``(n, WIDTH)``: uint8 ``(n, 256, 256, 4)``, as `scenes.draw` has them.

        Rows of any integer dtype and device.
        """
        parts = given.to(self._line.device, torch.long).split(_AT_ONCE)
        return torch.cat([self._drawn(part) for part in parts])

    def _drawn(self, given: torch.Tensor) -> torch.Tensor:
        picture = self._grounds[given[:, 0]].to(torch.int32)
        transparent = self._transparent[given[:, 0]][:, None, None, None]
        for slot in given[:, 1:].unflatten(1, (MOST_ITEMS, 5)).unbind(1):
            index, colour, radius, y, x = slot.unbind(1)
            coverage = self._coverage(index, radius, y, x)[..., None]
            paint = self._colours[colour][:, None, None]
            blend = (picture * (256 - coverage) + coverage * paint + 128) >> 8
            # A picture with alpha holds the item's own colour wherever any of it shows.
            cut = torch.cat([paint[..., :3].expand(*coverage.shape[:3], 3), coverage], dim=-1)
            cut = torch.where(coverage > 0, cut.clamp(max=255), picture)
            picture = torch.where(transparent, cut, blend)
        return picture.to(torch.uint8)

    def _coverage(self, index, radius, y, x) -> torch.Tensor:
        """Share of a pixel that the item covers, int32 ``(n, 256, 256)`` of 0..256."""
        side = 2 * radius[:, None] + 2
        down = self._line - y[:, None] + radius[:, None] + 1
        right = self._line - x[:, None] + radius[:, None] + 1
        inside = ((down >= 0) & (down < side))[:, :, None] & ((right >= 0) & (right < side))[
            :, None
        ]
        at = (index[:, None, None] * 2 * _REACH + down[:, :, None]) * 2 * _REACH + right[:, None]
        return torch.where(inside, self._masks[torch.where(inside, at, 0)], 0)
