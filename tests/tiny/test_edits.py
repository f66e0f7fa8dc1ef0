"""Edits change what they say and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from examples.tiny.captions import HELD_OUT, POSITIONS, WORDS, is_held_out, split, triples_of
from examples.tiny.edits import KINDS, Edit, random_edit
from examples.tiny.scenes import SHAPES, Background, Item, Scene
from examples.tiny.words import plural

EACH = 300
NAMES = {plural(shape): shape for shape in SHAPES} | {shape: shape for shape in SHAPES}


def _rng(seed: int = 0) -> random.Random:
    return random.Random(seed)  # noqa: S311 (pictures, not secrets)


def _edits(kind: str | None, held_out: bool = False, number: int = EACH) -> list[Edit]:
    rng = _rng()
    return [random_edit(rng, kind, held_out) for _ in range(number)]


def _group(scene: Scene, name: str) -> set[Item]:
    """The items that "red circles" names; its number agrees with theirs."""
    colour, noun = name.split(" ", 1)
    shape = NAMES[noun]
    items = {item for item in scene.items if (item.colour, item.shape) == (colour, shape)}
    assert items
    assert noun == (shape if len(items) == 1 else plural(shape))
    return items


def _changed(edit: Edit) -> tuple[set[Item], set[Item]]:
    """Items that went from, and that came to, the last reference."""
    before, after = set(edit.references[-1].items), set(edit.result.items)
    return before - after, after - before


def _background_stays(edit: Edit) -> None:
    assert edit.result.background == edit.references[-1].background


def test_recolour():
    for edit in _edits("recolour"):
        name, colour = edit.instruction.removeprefix("make the ").rsplit(" ", 1)
        gone, came = _changed(edit)
        assert gone == _group(edit.references[0], name)
        assert came == {replace(item, colour=colour) for item in gone}
        assert len(_group(edit.result, name.replace(name.split()[0], colour, 1))) == len(gone)
        _background_stays(edit)


def test_move():
    for edit in _edits("move"):
        name, position = edit.instruction.removeprefix("move the ").split(" to the ")
        gone, came = _changed(edit)
        assert gone == _group(edit.references[0], name)
        (item,) = gone
        assert came == {replace(item, cell=POSITIONS[position])}
        _background_stays(edit)


def test_add():
    for edit in _edits("add"):
        said, position = edit.instruction.removeprefix("add ").split(" at the ")
        _, size, name = said.split(" ", 2)
        gone, came = _changed(edit)
        (item,) = came
        assert not gone
        assert came == _group(edit.result, name)
        assert (item.size, item.cell) == (size, POSITIONS[position])
        _background_stays(edit)


def test_remove():
    for edit in _edits("remove"):
        gone, came = _changed(edit)
        assert gone == _group(edit.references[0], edit.instruction.removeprefix("remove the "))
        assert not came
        assert edit.result.items
        _background_stays(edit)


def test_background():
    for edit in _edits("background"):
        assert edit.result.items == edit.references[0].items
        assert edit.result.background != edit.references[0].background
        said = edit.instruction.removeprefix("change the background to ")
        if said == edit.instruction:
            assert said == "make the background transparent"
            assert edit.result.background == Background("transparent")
        else:
            colour, *pattern = said.split()
            assert colour != "transparent"
            assert edit.result.background == Background(colour, *pattern)


def test_combine():
    for edit in _edits("combine"):
        assert len(edit.references) == 2
        name, rest = edit.instruction.removeprefix("put the ").split(" of picture 1 ")
        assert rest == "into picture 2"
        gone, came = _changed(edit)
        assert not gone
        assert came == _group(edit.references[0], name) == _group(edit.result, name)
        _background_stays(edit)


def test_backdrop():
    for edit in _edits("backdrop"):
        first, second = edit.references
        assert edit.instruction == "put picture 1 on the background of picture 2"
        assert edit.result == Scene(first.items, second.background)
        assert first.background != second.background


def test_three():
    for edit in _edits("three"):
        assert len(edit.references) == 3
        said = edit.instruction.removeprefix("put the ").removesuffix(
            " of picture 2 into picture 3"
        )
        one, two = said.split(" of picture 1 and the ")
        gone, came = _changed(edit)
        assert not gone
        assert came == _group(edit.references[0], one) | _group(edit.references[1], two)
        assert len(came) == 2
        assert len(_group(edit.result, one)) == len(_group(edit.result, two)) == 1
        _background_stays(edit)


@pytest.mark.parametrize("held_out", [False, True])
def test_edits_hold_out_what_they_should(held_out):
    for edit in _edits(None, held_out, 2500):
        assert all(1 <= len(scene.items) <= 3 for scene in edit.references)
        before = frozenset().union(*(triples_of(scene) for scene in edit.references))
        after = triples_of(edit.result)
        if held_out:
            assert is_held_out(after | before if edit.kind == "remove" else after)
        else:
            assert HELD_OUT.isdisjoint(before | after)


def test_instructions_use_only_the_words():
    used = {word for edit in _edits(None, number=4000) for word in split(edit.instruction)}
    assert used <= set(WORDS)


def test_the_mix_of_kinds_and_the_same_seed():
    edits = _edits(None, number=3000)
    kinds = Counter(edit.kind for edit in edits)
    for kind, percent in KINDS.items():
        assert 100 * kinds[kind] / len(edits) == pytest.approx(percent, abs=2.5)
    assert edits[:50] == _edits(None, number=50)
