"""Edits: one to three scenes, an instruction in words, and the scene that it asks for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from .captions import (
    CELLS,
    Group,
    Triple,
    caption,
    is_held_out,
    items_of,
    named,
    random_background,
    random_kind,
    triples_of,
)
from .scenes import COLOURS, SIZES, Background, Item, Scene
from .wanted import Wanted
from .words import POSITIONS

KINDS = {
    "recolour": 20,
    "move": 15,
    "add": 15,
    "remove": 12,
    "background": 13,
    "combine": 10,
    "backdrop": 8,
    "three": 7,
}
"""Kinds of edits and how many of a hundred are of each; the last three take 2, 2 and 3 scenes."""

# Counts of the groups of a reference; only the single ones can be named as one item.
_MIXED = ((1,), (2,), (3,), (1, 1), (1, 1), (1, 2), (2, 1), (1, 1, 1))
_FIRST_SINGLE = ((1,), (1, 1), (1, 1), (1, 2), (1, 1, 1))
_SEVERAL_GROUPS = ((1, 1), (1, 1), (1, 2), (2, 1), (1, 1, 1))
_NAMES = {cell: name for name, cell in POSITIONS.items()}


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit, its references in the order in which the instruction numbers them.

    Items that the instruction does not name are the same in `result`: cell, offset and radius.
    """

    kind: str
    references: tuple[Scene, ...]
    instruction: str
    result: Scene


_Made = tuple[tuple[Scene, ...], str, Scene]


def random_edit(rng: random.Random, kind: str | None = None, held_out: bool = False) -> Edit:
    """Draw an edit.

    Parameters
    ----------
    rng
        The only source of chance.
    kind
        One of `KINDS`; None: drawn with their shares.
    held_out
        Whether the result, or what a "remove" removes, has a held-out triple (for evaluation),
        or neither the references nor the result have one (training).
    """
    if kind is None:
        kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    make = _MAKERS[kind]
    while True:
        references, instruction, result = make(rng, held_out)
        shown = triples_of(result)
        before = frozenset[Triple]().union(*map(triples_of, references))
        # What is removed is in the reference alone.
        concerned = shown | before if kind == "remove" or not held_out else shown
        if is_held_out(concerned) == held_out:
            return Edit(kind, references, instruction, result)


def _reference(
    rng: random.Random,
    held_out: bool,
    shapes: tuple[tuple[int, ...], ...] = _MIXED,
    avoid: tuple[Item, ...] = (),
) -> Scene:
    """A scene of some groups, none of a kind or in a cell of the items to avoid."""
    kinds = [(item.colour, item.shape) for item in avoid]
    taken = {item.cell for item in avoid}
    free = [cell for cell in CELLS if cell not in taken]
    items: list[Item] = []
    for count in rng.choice(shapes):
        kind = random_kind(rng, count, held_out, kinds)
        kinds.append(kind)
        cells = rng.sample(free, count)
        free = [cell for cell in free if cell not in cells]
        items += items_of(Group(count, *kind), cells, rng)
    return Scene(tuple(items), random_background(rng))


def _free(scene: Scene, rng: random.Random) -> tuple[int, int]:
    taken = {item.cell for item in scene.items}
    return rng.choice([cell for cell in CELLS if cell not in taken])


def _group_of(scene: Scene, rng: random.Random) -> tuple[int, str, str]:
    """Count, colour and shape of one of the groups."""
    kinds = Counter((item.colour, item.shape) for item in scene.items)
    (colour, shape), count = rng.choice(list(kinds.items()))
    return count, colour, shape


def _recolour(rng: random.Random, held_out: bool) -> _Made:
    scene = _reference(rng, held_out)
    count, colour, shape = _group_of(scene, rng)
    taken = {item.colour for item in scene.items if item.shape == shape}
    new = rng.choice([other for other in COLOURS if other not in taken])
    items = tuple(
        replace(item, colour=new) if (item.colour, item.shape) == (colour, shape) else item
        for item in scene.items
    )
    instruction = f"make the {named(count, colour, shape)} {new}"
    return (scene,), instruction, Scene(items, scene.background)


def _move(rng: random.Random, held_out: bool) -> _Made:
    scene = _reference(rng, held_out, _FIRST_SINGLE)
    mover = scene.items[0]
    cell = _free(scene, rng)
    items = (replace(mover, cell=cell), *scene.items[1:])
    instruction = f"move the {named(1, mover.colour, mover.shape)} to the {_NAMES[cell]}"
    return (scene,), instruction, Scene(items, scene.background)


def _add(rng: random.Random, held_out: bool) -> _Made:
    scene = _reference(rng, held_out)
    kinds = [(item.colour, item.shape) for item in scene.items]
    cell = _free(scene, rng)
    # The size and the cell are always said: an instruction has one right result.
    group = Group(1, *random_kind(rng, 1, held_out, kinds), rng.choice(SIZES), _NAMES[cell])
    items = (*scene.items, *items_of(group, [cell], rng))
    return (scene,), f"add {caption(Wanted((group,)))}", Scene(items, scene.background)


def _remove(rng: random.Random, held_out: bool) -> _Made:
    scene = _reference(rng, held_out, _SEVERAL_GROUPS)
    count, colour, shape = _group_of(scene, rng)
    items = tuple(item for item in scene.items if (item.colour, item.shape) != (colour, shape))
    instruction = f"remove the {named(count, colour, shape)}"
    return (scene,), instruction, Scene(items, scene.background)


def _background(rng: random.Random, held_out: bool) -> _Made:
    scene = _reference(rng, held_out)
    new = scene.background
    while new == scene.background:
        new = random_background(rng)
    return (scene,), _change_to(new), Scene(scene.items, new)


def _change_to(background: Background) -> str:
    if background.colour == "transparent":
        return "make the background transparent"
    pattern = "" if background.pattern == "plain" else f" {background.pattern}"
    return f"change the background to {background.colour}{pattern}"


def _combine(rng: random.Random, held_out: bool) -> _Made:
    giver = _reference(rng, held_out, _FIRST_SINGLE)
    item = giver.items[0]
    taker = _reference(rng, held_out, avoid=(item,))
    instruction = f"put {_of_picture(item, 1)} into picture 2"
    return (giver, taker), instruction, Scene((*taker.items, item), taker.background)


def _backdrop(rng: random.Random, held_out: bool) -> _Made:
    front = _reference(rng, held_out)
    behind = _reference(rng, held_out)
    while behind.background == front.background:
        behind = replace(behind, background=random_background(rng))
    instruction = "put picture 1 on the background of picture 2"
    return (front, behind), instruction, Scene(front.items, behind.background)


def _three(rng: random.Random, held_out: bool) -> _Made:
    first = _reference(rng, held_out, _FIRST_SINGLE)
    one = first.items[0]
    second = _reference(rng, held_out, _FIRST_SINGLE, (one,))
    two = second.items[0]
    third = _reference(rng, held_out, avoid=(one, two))
    instruction = f"put {_of_picture(one, 1)} and {_of_picture(two, 2)} into picture 3"
    return (first, second, third), instruction, Scene((*third.items, one, two), third.background)


def _of_picture(item: Item, number: int) -> str:
    return f"the {named(1, item.colour, item.shape)} of picture {number}"


_MAKERS: dict[str, Callable[[random.Random, bool], _Made]] = {
    "recolour": _recolour,
    "move": _move,
    "add": _add,
    "remove": _remove,
    "background": _background,
    "combine": _combine,
    "backdrop": _backdrop,
    "three": _three,
}
