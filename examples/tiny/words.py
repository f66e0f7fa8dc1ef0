"""The words of captions and edit instructions."""

from __future__ import annotations

import re

from .scenes import BACKGROUNDS, COLOURS, PATTERNS, SHAPES, SIZES

NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
POSITIONS = {
    "top left": (0, 0),
    "top": (0, 1),
    "top right": (0, 2),
    "left": (1, 0),
    "center": (1, 1),
    "right": (1, 2),
    "bottom left": (2, 0),
    "bottom": (2, 1),
    "bottom right": (2, 2),
}
"""Cells (row, column) by name."""
RELATIONS = ("left of", "right of", "above", "below")

_PLURALS = {
    shape: shape.replace("letter", "letters")
    if shape.startswith("letter")
    else f"{shape}es"
    if shape.endswith("s")
    else f"{shape}s"
    for shape in SHAPES
}
_GLYPHS = {shape.split()[1].lower(): shape.split()[1] for shape in SHAPES if " " in shape}
_LINKS = ["a", "an", "and", "at", "the", "on", "of", "background", "."]
_EDITS = ["make", "move", "to", "add", "remove", "change", "put", "into", "picture", "1", "2", "3"]
_PIECE = re.compile(r"[^\W_]+|[^\w\s]|_")


def plural(shape: str) -> str:
    """The shape's name for several: ``"crosses"``, ``"letters H"``."""
    return _PLURALS[shape]


def split(text: str) -> list[str]:
    """Split a caption or an instruction into tokens.

    Words are lower case, but for the letters that are shapes; each punctuation mark is a token.
    """
    tokens: list[str] = []
    for piece in _PIECE.findall(text):
        word = piece.lower()
        if tokens and tokens[-1] in ("letter", "letters"):
            word = _GLYPHS.get(word, word)
        tokens.append(word)
    return tokens


WORDS = tuple(
    sorted(
        {
            word
            for name in (
                *NUMBERS,
                *SIZES,
                *COLOURS,
                *BACKGROUNDS,
                *(pattern for pattern in PATTERNS if pattern != "plain"),
                *SHAPES,
                *_PLURALS.values(),
                *POSITIONS,
                *RELATIONS,
                *_LINKS,
                *_EDITS,
            )
            for word in name.split()
        }
    )
)
"""Every token that `split` gives for a caption or an edit instruction, sorted."""
