"""Captions read back into what they ask for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from .scenes import BACKGROUNDS, COLOURS, PATTERNS, SHAPES, SIZES, TINTS, Background
from .wanted import Group, Wanted
from .words import NUMBERS, POSITIONS, RELATIONS, WORDS, plural, split

_COUNTS = {"a": 1, "an": 1, **NUMBERS}
_BY_LENGTH = {
    name: name.split() for name in sorted((*POSITIONS, *RELATIONS), key=len, reverse=True)
}
_PATTERNS = tuple(pattern for pattern in PATTERNS if pattern != "plain")


class GrammarError(ValueError):
    """A caption outside the grammar; the message says where, and what can be said there."""


class _Reader:
    """A caption's tokens, read from the left."""

    def __init__(self, text: str) -> None:
        self.tokens = split(text)
        if self.tokens and self.tokens[-1] == ".":
            self.tokens.pop()
        self.at = 0

    def left(self) -> str:
        return " ".join(self.tokens[self.at :])

    def take(self, *names: str) -> bool:
        """Go past the first of the names (of one word or more) that comes next, if one does."""
        for name in names:
            words = _BY_LENGTH.get(name) or name.split()
            if self.tokens[self.at : self.at + len(words)] == words:
                self.at += len(words)
                return True
        return False

    def one_of(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if self.take(name)), None)

    def must(self, what: str, names: Iterable[str]) -> str:
        names = tuple(names)
        found = self.one_of(names)
        if found is None:
            raise self.unread(f"{what}: {', '.join(names)}")
        return found

    def unread(self, hint: str) -> GrammarError:
        rest = f'"{self.left()}"' if self.left() else "the end of the caption"
        return GrammarError(f"could not read {rest}; here can be said {hint}")


def parse(text: str) -> Wanted:
    """Read a caption: the inverse of `caption`.

    "a", "an" and "one" say the same, letter case and a final dot do not matter.

    Raises
    ------
    GrammarError
        Names the first unknown word, or the part that could not be read, and what can be said.
    """
    reader = _Reader(text)
    _all_known(reader.tokens)
    groups = [_group(reader)]
    relation = reader.one_of(RELATIONS)
    if relation or reader.take("and"):
        groups.append(_group(reader))
    background = _background(reader) if reader.take("on") else None
    if reader.left():
        hint = "the background (on a white background)"
        if len(groups) == 1:
            hint = f"a second group (and, {', '.join(RELATIONS)}), or {hint}"
        raise reader.unread("nothing more" if background else hint)
    try:
        return Wanted(tuple(groups), relation, background)
    except ValueError as error:
        raise GrammarError(f'could not read "{text}": {error}') from None


def _all_known(tokens: list[str]) -> None:
    for token in tokens:
        if token not in WORDS:
            near = get_close_matches(token, WORDS, 1)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise GrammarError(
                f'unknown word "{token}"; {hint}Shapes: {", ".join(SHAPES)}; colours: '
                f"{', '.join(COLOURS)}; backgrounds: {', '.join(BACKGROUNDS)}, "
                f"{', '.join(_PATTERNS)}; sizes: {', '.join(SIZES)}"
            )


def _group(reader: _Reader) -> Group:
    count = _COUNTS[reader.must("how many", _COUNTS)]
    size = reader.one_of(SIZES)
    colour = reader.must("a colour" if size else "a size or a colour", COLOURS)
    shapes = {shape if count == 1 else plural(shape): shape for shape in SHAPES}
    shape = shapes[reader.must("a shape" if count == 1 else "shapes", shapes)]
    position = None
    if reader.take("at"):
        if not reader.take("the"):
            raise reader.unread("a position (at the top left)")
        positions = [name for name in _BY_LENGTH if name in POSITIONS]
        position = reader.must("a position", positions)
        if count > 1:
            raise GrammarError(
                f'could not read "at the {position}"; where it is can be said of one item only'
            )
    return Group(count, colour, shape, size, position)


def _background(reader: _Reader) -> Background:
    reader.must("a background", ["a", "an"])
    colour = reader.must("a background colour", BACKGROUNDS)
    pattern = reader.one_of(_PATTERNS) if colour in TINTS else None
    if not reader.take("background"):
        choice = f"{', '.join(_PATTERNS)}, background"
        raise reader.unread("background" if pattern or colour not in TINTS else choice)
    return Background(colour, pattern or "plain")
