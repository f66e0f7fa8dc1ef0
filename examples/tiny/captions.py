"""Captions: what can be asked of a picture, in words, and scenes that show it."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable

from .parsing import GrammarError, parse
from .scenes import (
    BACKGROUNDS,
    COLOURS,
    JITTER,
    PATTERNS,
    RADII,
    SHAPES,
    SIZES,
    Background,
    Item,
    Scene,
)
from .wanted import HELD_OUT, Group, Triple, Wanted, is_held_out, triples_of
from .words import NUMBERS, POSITIONS, RELATIONS, WORDS, plural, split

__all__ = [
    "CELLS",
    "HELD_OUT",
    "POSITIONS",
    "RELATIONS",
    "WORDS",
    "GrammarError",
    "Group",
    "Triple",
    "Wanted",
    "caption",
    "is_held_out",
    "items_of",
    "named",
    "parse",
    "random_background",
    "random_kind",
    "random_wanted",
    "scene_of",
    "split",
    "triples_of",
]

CELLS = tuple(POSITIONS.values())

_COLOURS, _NUMBERS = tuple(COLOURS), tuple(NUMBERS)
_ONE_GROUP = (1, 1, 1, 1, 2, 2, 3, 3, 4)
_TWO_GROUPS = 4 * ((1, 1),) + (
    (1, 2),
    (2, 1),
    (2, 2),
    (1, 3),
    (3, 1),
    (2, 3),
    (3, 2),
    (1, 4),
    (4, 1),
)
# Where a relation excludes positions none is said; elsewhere more often, for 35 % in all.
_SAY_POSITION = 0.43


def named(count: int, colour: str, shape: str, size: str | None = None) -> str:
    """A group in words, without its number: ``"small red circle"``, ``"black crosses"``."""
    noun = shape if count == 1 else plural(shape)
    return f"{size} {colour} {noun}" if size else f"{colour} {noun}"


def caption(wanted: Wanted) -> str:
    """Say what is wanted: ``"two red circles on a blue striped background"``."""
    text = f" {wanted.relation or 'and'} ".join(map(_said, wanted.groups))
    background = wanted.background
    if background is None:
        return text
    pattern = "" if background.pattern == "plain" else f"{background.pattern} "
    return f"{text} on a {background.colour} {pattern}background"


def _said(group: Group) -> str:
    name = named(*group.triple, group.size)
    if group.count == 1:
        article = "an" if name[0] in "aeiou" else "a"
    else:
        article = _NUMBERS[group.count - 1]
    where = f" at the {group.position}" if group.position else ""
    return f"{article} {name}{where}"


def random_background(rng: random.Random) -> Background:
    """A background, plain in four of ten where it is not transparent."""
    colour = rng.choice(BACKGROUNDS)
    if colour == "transparent" or rng.random() < 0.4:
        return Background(colour)
    return Background(colour, rng.choice(PATTERNS[1:]))


def random_kind(
    rng: random.Random, count: int, held_out: bool, taken: Collection[tuple[str, str]] = ()
) -> tuple[str, str]:
    """Colour and shape of a group of so many, not of a kind taken.

    With `held_out` any, otherwise none that makes a held-out triple.
    """
    while True:
        kind = rng.choice(_COLOURS), rng.choice(SHAPES)
        if kind not in taken and (held_out or (count, *kind) not in HELD_OUT):
            return kind


def random_wanted(rng: random.Random, held_out: bool) -> Wanted:
    """Draw something to ask for.

    Parameters
    ----------
    rng
        The only source of chance.
    held_out
        Whether at least one group is a held-out triple (for evaluation), or none (training).
    """
    while True:
        wanted = _any_wanted(rng, held_out)
        if not held_out or is_held_out(group.triple for group in wanted.groups):
            return wanted


def _any_wanted(rng: random.Random, held_out: bool) -> Wanted:
    counts = (rng.choice(_ONE_GROUP),) if rng.random() < 0.55 else rng.choice(_TWO_GROUPS)
    relation = rng.choice(RELATIONS) if counts == (1, 1) and rng.random() < 0.5 else None
    groups: list[Group] = []
    free = list(POSITIONS)
    for count in counts:
        taken = [(group.colour, group.shape) for group in groups]
        kind = random_kind(rng, count, held_out, taken)
        size = rng.choice(SIZES) if rng.random() < 0.3 else None
        position = None
        if count == 1 and relation is None and rng.random() < _SAY_POSITION:
            position = rng.choice(free)
            free.remove(position)
        groups.append(Group(count, *kind, size, position))
    background = random_background(rng) if rng.random() < 0.8 else None
    return Wanted(tuple(groups), relation, background)


def scene_of(wanted: Wanted, rng: random.Random) -> Scene:
    """Draw a scene that shows what is wanted; what is not said is random.

    The items of a group have one size.
    """
    cells: list[tuple[int, int] | None]
    if wanted.relation:
        cells = list(_related(wanted.relation, rng))
    else:
        cells = [POSITIONS[g.position] if g.position else None for g in wanted.groups]
    free = [cell for cell in CELLS if cell not in cells]
    items: list[Item] = []
    for group, cell in zip(wanted.groups, cells):
        chosen = [cell] if cell else rng.sample(free, group.count)
        free = [other for other in free if other not in chosen]
        items += items_of(group, chosen, rng)
    return Scene(tuple(items), wanted.background or random_background(rng))


def items_of(group: Group, cells: Iterable[tuple[int, int]], rng: random.Random) -> list[Item]:
    """The items of a group in the cells given, with radius and offset drawn for each."""
    size = group.size or rng.choice(SIZES)
    low, high = RADII[size]
    jitter = JITTER[size]
    return [
        Item(
            group.shape,
            group.colour,
            size,
            cell,
            rng.randint(low, high),
            (rng.randint(-jitter, jitter), rng.randint(-jitter, jitter)),
        )
        for cell in cells
    ]


def _related(relation: str, rng: random.Random) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two cells of which the first is left of, right of, above or below the second."""
    low, high = sorted(rng.sample(range(3), 2))
    first, second = (low, high) if relation in ("left of", "above") else (high, low)
    along = rng.randrange(3), rng.randrange(3)
    if relation in ("left of", "right of"):
        return (along[0], first), (along[1], second)
    return (first, along[0]), (second, along[1])
