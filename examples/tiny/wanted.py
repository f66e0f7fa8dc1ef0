"""What a caption asks of a picture, and which combinations are held out of training."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .scenes import COLOURS, MOST_ITEMS, SHAPES, SIZES, Background, Scene
from .words import POSITIONS, RELATIONS

MOST_OF_A_GROUP = 4

Triple = tuple[int, str, str]
"""Count, colour and shape of a group."""

HELD_OUT: frozenset[Triple] = frozenset(
    (count, colour, shape)
    for count in range(1, MOST_OF_A_GROUP + 1)
    for colour in COLOURS
    for shape in SHAPES
    if zlib.crc32(f"{count} {colour} {shape}".encode()) % 8 == 0
)
"""Triples that no scene of training shows as a group of exactly that count."""


@dataclass(frozen=True, slots=True)
class Group:
    """Items of one colour and shape.

    Parameters
    ----------
    count
        1 to `MOST_OF_A_GROUP`.
    colour, shape
        Of `COLOURS` and `SHAPES`.
    size
        One of `SIZES` for all of them; None: not said.
    position
        One of `POSITIONS`, for a count of 1 only; None: not said.
    """

    count: int
    colour: str
    shape: str
    size: str | None = None
    position: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_OF_A_GROUP:
            raise ValueError(f"{self.count} of a kind: 1 to {MOST_OF_A_GROUP}")
        if self.colour not in COLOURS or self.shape not in SHAPES:
            raise ValueError(f"no such kind: {self.colour} {self.shape}")
        if self.size is not None and self.size not in SIZES:
            raise ValueError(f"no such size: {self.size}")
        if self.position is not None and (self.position not in POSITIONS or self.count > 1):
            raise ValueError(f"only a single item can be at the {self.position}")

    @property
    def triple(self) -> Triple:
        """Count, colour and shape."""
        return self.count, self.colour, self.shape


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caption says.

    Parameters
    ----------
    groups
        One or two, of different kinds (colour and shape), `MOST_ITEMS` items at most.
    relation
        One of `RELATIONS`, of the first of two single items to the second: their columns
        ("left of", "right of") or rows differ that way. Excludes positions.
    background
        None: not said, any will do.
    """

    groups: tuple[Group, ...]
    relation: str | None = None
    background: Background | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= 2:
            raise ValueError("one group of items or two")
        if sum(group.count for group in self.groups) > MOST_ITEMS:
            raise ValueError(f"at most {MOST_ITEMS} items")
        if len({group.triple[1:] for group in self.groups}) < len(self.groups):
            raise ValueError("the two groups are of one colour and shape")
        said = [group.position for group in self.groups if group.position]
        if len(set(said)) < len(said):
            raise ValueError(f"two items at the {said[0]}")
        if self.relation is not None:
            if self.relation not in RELATIONS:
                raise ValueError(f"no such relation: {self.relation}")
            if [group.count for group in self.groups] != [1, 1]:
                raise ValueError(f"{self.relation!r} is said of two single items")
            if said:
                raise ValueError(f"say either {self.relation!r} or where the items are")


def triples_of(scene: Scene) -> frozenset[Triple]:
    """Count, colour and shape of each group of a scene."""
    kinds = Counter((item.colour, item.shape) for item in scene.items)
    return frozenset((count, *kind) for kind, count in kinds.items())


def is_held_out(triples: Iterable[Triple]) -> bool:
    """Whether any of the triples is held out of training."""
    return not HELD_OUT.isdisjoint(triples)
