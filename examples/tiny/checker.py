"""Whether a picture shows what a caption, or an edit, asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from .scenes import CENTRES, Background, Scene
from .seeing import Seen, SeenItem, see
from .wanted import Wanted
from .words import POSITIONS

__all__ = ["Seen", "SeenItem", "Verdict", "check", "check_scene", "see", "summary"]

# Between cells: a relation holds when the centres are at least half a cell apart.
_APART = (CENTRES[1] - CENTRES[0]) / 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much of what was asked for a picture shows.

    Each object asked for is paired with at most one that was seen, so that as many as can be
    have the right shape, then the right colour, cell and size.

    Parameters
    ----------
    shapes, colours
        Share of the objects asked for whose partner has that shape, and that colour; 0..1.
        A picture with the colours of two objects exchanged has all shapes right, no colours.
    counts
        Share of the groups (colour and shape) that have as many objects as asked for; 0..1.
        Each object seen counts for the group most like it: of its shape and colour, else of its
        shape, else of its colour, else one that lacks objects.
    positions
        Share that holds of the positions said and the relation said; of a scene, share of the
        objects whose partner is in the right cell. None: none was said.
    sizes
        Share of the objects with a size said whose partner has it. None: none was said.
    background
        Whether colour and pattern are right. None: not said.
    all
        Whether all of this is right and there is no object more.
    """

    shapes: float
    colours: float
    counts: float
    positions: float | None
    sizes: float | None
    background: bool | None
    all: bool


@dataclass(frozen=True, slots=True)
class _Expected:
    shape: str
    colour: str
    size: str | None
    cell: tuple[int, int] | None


def check(rgba: np.ndarray, wanted: Wanted) -> Verdict:
    """Compare a picture with what a caption asks for.

    Parameters
    ----------
    rgba
        uint8 (256, 256, 4), alpha straight.
    """
    seen = see(rgba)
    expected = [
        _Expected(g.shape, g.colour, g.size, POSITIONS[g.position] if g.position else None)
        for g in wanted.groups
        for _ in range(g.count)
    ]
    partners = _paired(expected, seen.items)
    held = []
    if wanted.relation:
        held.append(_holds(wanted.relation, partners[0], partners[1]))
    return _verdict(expected, partners, seen, held, wanted.background)


def check_scene(rgba: np.ndarray, scene: Scene) -> Verdict:
    """Compare a picture with a scene: each item's shape, colour, cell and size, and the background.

    For the results of edits, which say all of this. Radii and offsets within a size and a cell
    do not matter.

    Parameters
    ----------
    rgba
        uint8 (256, 256, 4), alpha straight.
    """
    seen = see(rgba)
    expected = [_Expected(i.shape, i.colour, i.size, i.cell) for i in scene.items]
    return _verdict(expected, _paired(expected, seen.items), seen, [], scene.background)


def summary(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Mean of each field over the verdicts that have it (all count alike), 0..1."""
    verdicts = list(verdicts)
    means = {}
    for field in fields(Verdict):
        values = [getattr(verdict, field.name) for verdict in verdicts]
        said = [float(value) for value in values if value is not None]
        if said:
            means[field.name] = sum(said) / len(said)
    return means


def _verdict(
    expected: Sequence[_Expected],
    partners: Sequence[SeenItem | None],
    seen: Seen,
    held: list[bool],
    background: Background | None,
) -> Verdict:
    pairs = list(zip(expected, partners))
    held = held + [p is not None and p.cell == e.cell for e, p in pairs if e.cell is not None]
    sized = [p is not None and p.size == e.size for e, p in pairs if e.size is not None]
    shapes = _share([p is not None and p.shape == e.shape for e, p in pairs])
    colours = _share([p is not None and p.colour == e.colour for e, p in pairs])
    counts = _counts(expected, seen.items)
    positions = _share(held) if held else None
    sizes = _share(sized) if sized else None
    behind = None if background is None else seen.background == background
    right = all(part in (None, 1) for part in (shapes, colours, counts, positions, sizes, behind))
    return Verdict(
        shapes,
        colours,
        counts,
        positions,
        sizes,
        behind,
        right and len(seen.items) == len(expected),
    )


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 1.0


def _paired(expected: Sequence[_Expected], seen: Sequence[SeenItem]) -> list[SeenItem | None]:
    """The partner of each expected object, by the best sum of what agrees.

    Over the objects seen, the best way to serve each subset (a bit mask) of the expected ones:
    exact, and quick for the few that a scene may have.
    """
    best: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {0: (0, ())}
    for s, item in enumerate(seen):
        for served, (gain, pairs) in list(best.items()):
            for e, want in enumerate(expected):
                bit = 1 << e
                if served & bit:
                    continue
                more = gain + _agreement(want, item)
                if more > best.get(served | bit, (-1, ()))[0]:
                    best[served | bit] = more, (*pairs, (e, s))
    _, pairs = max(best.values(), key=lambda way: way[0])
    partners: list[SeenItem | None] = [None] * len(expected)
    for e, s in pairs:
        partners[e] = seen[s]
    return partners


def _agreement(want: _Expected, item: SeenItem) -> int:
    """What agrees, in steps of 16: five objects of one step less never outweigh one."""
    return (
        16**4 * (item.shape == want.shape)
        + 16**3 * (item.colour == want.colour)
        + 16**2 * (item.cell == want.cell)
        + 16 * (item.size == want.size)
        + 1
    )


def _counts(expected: Sequence[_Expected], seen: Sequence[SeenItem]) -> float:
    """Share of the groups with the right number of objects (see `Verdict`)."""
    asked = Counter((want.shape, want.colour) for want in expected)
    if not asked:
        return float(not seen)
    lacking = dict(asked)

    def like(item: SeenItem, kind: tuple[str, str]) -> int:
        return 2 * (item.shape == kind[0]) + (item.colour == kind[1])

    # The most alike first, so that the others go where objects are still lacking.
    for item in sorted(seen, key=lambda item: -max(like(item, kind) for kind in asked)):
        nearest = max(asked, key=lambda kind: (like(item, kind), lacking[kind] > 0))
        lacking[nearest] -= 1
    return sum(number == 0 for number in lacking.values()) / len(asked)


def _holds(relation: str, first: SeenItem | None, second: SeenItem | None) -> bool:
    if first is None or second is None:
        return False
    down = second.centre[0] - first.centre[0]
    right = second.centre[1] - first.centre[1]
    return {"left of": right, "right of": -right, "above": down, "below": -down}[relation] >= _APART
