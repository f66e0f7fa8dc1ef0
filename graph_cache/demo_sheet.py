"""A sheet of pictures side by side: a row for each prompt, a column for each way to make it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import NamedTuple

from PIL import Image, ImageChops, ImageDraw, ImageFont

SIDE = 256
"""Height and width that a picture is shown in, px; larger ones are scaled down."""
_GAP, _LINE, _FIELD = 12, 18, 8
_LIGHT, _DARK = 235, 205


class Cell(NamedTuple):
    """A picture and the lines of text below it."""

    image: Image.Image
    lines: Sequence[str]


def largest_difference(one: Image.Image, other: Image.Image) -> int:
    """Largest difference of any pixel in any channel, alpha included: 0 to 255.

    Raises
    ------
    ValueError
        If the pictures are not of one size.
    """
    if one.size != other.size:
        raise ValueError(f"pictures of {one.size} and {other.size} pixels")
    difference = ImageChops.difference(one.convert("RGBA"), other.convert("RGBA"))
    return max(high for _, high in difference.getextrema())


def draw_sheet(rows: Sequence[tuple[str, Sequence[Cell]]], path: FilePath) -> None:
    """Write rows of pictures, each with its title, over a checkered ground where they are clear.

    Parameters
    ----------
    rows
        A row's title and its cells.
    path
        PNG file.
    """
    font = ImageFont.load_default(13)
    shown = [
        (title, [(_scaled(cell.image), cell.lines) for cell in cells]) for title, cells in rows
    ]
    widest = max((cell for _, cells in shown for cell in cells), key=lambda cell: cell[0].width)
    step = max(widest[0].width, SIDE) + _GAP
    heights = [
        _LINE + max(image.height + _LINE * len(lines) for image, lines in cells) + _GAP
        for _, cells in shown
    ]
    columns = max(len(cells) for _, cells in shown)
    page = Image.new("RGB", (columns * step + _GAP, sum(heights) + _GAP), "white")
    pen = ImageDraw.Draw(page)
    top = _GAP
    for (title, cells), height in zip(shown, heights):
        pen.text((_GAP, top), " ".join(title.split()), fill="black", font=font)
        for column, (image, lines) in enumerate(cells):
            left, below = _GAP + column * step, top + _LINE + image.height + 3
            page.paste(_checkers(image.size), (left, top + _LINE))
            page.paste(image.convert("RGB"), (left, top + _LINE), image.getchannel("A"))
            for number, line in enumerate(lines):
                pen.text((left, below + number * _LINE), line, fill="black", font=font)
        top += height
    page.save(path)


def _scaled(image: Image.Image) -> Image.Image:
    """As RGBA, at most `SIDE` high and wide."""
    image = image.convert("RGBA")
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE))
    return image


def _checkers(size: tuple[int, int]) -> Image.Image:
    """Light and dark fields, to see through a picture what is clear of it."""
    ground = Image.new("L", size, _LIGHT)
    pen = ImageDraw.Draw(ground)
    for y in range(0, size[1], _FIELD):
        for x in range(_FIELD * (y // _FIELD % 2), size[0], 2 * _FIELD):
            pen.rectangle((x, y, x + _FIELD - 1, y + _FIELD - 1), fill=_DARK)
    return ground.convert("RGB")
