"""Captions: said, read back, held out, and shown by scenes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from examples.tiny.captions import (
    HELD_OUT,
    POSITIONS,
    WORDS,
    GrammarError,
    Group,
    Wanted,
    caption,
    is_held_out,
    parse,
    random_wanted,
    scene_of,
    split,
    triples_of,
)
from examples.tiny.scenes import Background

SEVERAL = 4000


def _rng(seed: int = 0) -> random.Random:
    return random.Random(seed)  # noqa: S311 (pictures, not secrets)


def _wanteds(held_out: bool, seed: int = 0, number: int = SEVERAL) -> list[Wanted]:
    rng = _rng(seed)
    return [random_wanted(rng, held_out) for _ in range(number)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "two red circles on a blue striped background",
            Wanted((Group(2, "red", "circle"),), None, Background("blue", "striped")),
        ),
        (
            "a small green star at the top left on a white background",
            Wanted((Group(1, "green", "star", "small", "top left"),), None, Background("white")),
        ),
        (
            "a red circle left of a large blue square on a transparent background",
            Wanted(
                (Group(1, "red", "circle"), Group(1, "blue", "square", "large")),
                "left of",
                Background("transparent"),
            ),
        ),
        (
            "three yellow hearts and a black cross",
            Wanted((Group(3, "yellow", "heart"), Group(1, "black", "cross"))),
        ),
        ("an orange letter H", Wanted((Group(1, "orange", "letter H"),))),
        ("two red letters H", Wanted((Group(2, "red", "letter H"),))),
        ("four large black crosses", Wanted((Group(4, "black", "cross", "large"),))),
    ],
)
def test_captions_read_as_english(text, wanted):
    assert caption(wanted) == text
    assert parse(text) == wanted


@pytest.mark.parametrize("held_out", [False, True])
def test_what_is_said_is_read_back(held_out):
    for wanted in _wanteds(held_out):
        assert parse(caption(wanted)) == wanted


def test_articles_case_and_a_final_dot_do_not_matter():
    wanted = Wanted((Group(1, "red", "letter L"), Group(1, "orange", "ring")), "above")
    for text in (
        "A red letter l above an orange ring.",
        "one red LETTER L above a orange ring",
        "an red letter L above one orange ring .",
    ):
        assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a red hexagon", 'unknown word "hexagon"'),
        ("a red circel and a hexagon", 'did you mean "circle"'),
        ("red circle", '"red circle"; here can be said how many'),
        ("a circle", '"circle"; here can be said a size or a colour'),
        ("two red circle", '"circle"; here can be said shapes: circles'),
        ("a red circle at top", "a position (at the top left)"),
        ("two red circles at the top", "of one item only"),
        ("a red circle on a transparent striped background", '"striped background"'),
        ("a red circle on a blue", "the end of the caption"),
        ("a red circle on a white background and a red star", '"and a red star"'),
        ("a red circle left of two blue squares", "two single items"),
        ("a red circle at the left above a blue ring", "either 'above' or"),
        ("a red circle and two red circles", "one colour and shape"),
        ("four red circles and two blue rings", "at most 5"),
        ("make the red circle blue", '"make the red circle blue"'),
        ("", "how many"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_can_be_said(text, part):
    with pytest.raises(GrammarError) as caught:
        parse(text)
    assert part in str(caught.value)


def test_captions_use_only_the_words():
    used = {word for held in (False, True) for w in _wanteds(held) for word in split(caption(w))}
    assert used <= set(WORDS)
    assert list(WORDS) == sorted(set(WORDS))
    assert len(WORDS) < 110
    assert split("A red letter h, one.") == ["a", "red", "letter", "H", ",", "one", "."]


def test_the_same_seed_draws_the_same():
    assert _wanteds(True, 3, 50) == _wanteds(True, 3, 50)
    assert _wanteds(True, 3, 50) != _wanteds(True, 4, 50)
    wanted = random_wanted(_rng(), False)
    assert scene_of(wanted, _rng(1)) == scene_of(wanted, _rng(1))
    assert scene_of(wanted, _rng(1)) != scene_of(wanted, _rng(2))


def test_held_out_triples_are_never_in_training_and_always_in_evaluation():
    rng = _rng(9)
    assert 0.07 < len(HELD_OUT) / (4 * 7 * 12) < 0.18
    for wanted in _wanteds(False):
        assert not is_held_out(triples_of(scene_of(wanted, rng)))
    seen = set()
    for wanted in _wanteds(True):
        triples = triples_of(scene_of(wanted, rng))
        assert is_held_out(triples)
        seen |= triples & HELD_OUT
    assert seen == HELD_OUT


def test_scenes_show_what_is_wanted():
    rng = _rng(1)
    for wanted in _wanteds(False):
        scene = scene_of(wanted, rng)
        kinds = Counter((item.colour, item.shape) for item in scene.items)
        assert kinds == {(g.colour, g.shape): g.count for g in wanted.groups}
        assert wanted.background in (None, scene.background)
        cells = []
        for group in wanted.groups:
            items = [i for i in scene.items if (i.colour, i.shape) == (group.colour, group.shape)]
            sizes = {item.size for item in items}
            assert len(sizes) == 1
            assert group.size is None or sizes == {group.size}
            assert group.position is None or items[0].cell == POSITIONS[group.position]
            cells.append(items[0].cell)
        if wanted.relation:
            (y0, x0), (y1, x1) = cells
            assert {
                "left of": x0 < x1,
                "right of": x0 > x1,
                "above": y0 < y1,
                "below": y0 > y1,
            }[wanted.relation]


def test_the_mix_of_what_is_said():
    wanteds = _wanteds(False, 5, 8000)
    groups = [group for wanted in wanteds for group in wanted.groups]
    singles = [group for group in groups if group.count == 1]
    pairs = [w for w in wanteds if [g.count for g in w.groups] == [1, 1]]

    def share(flags: list[bool]) -> float:
        return sum(flags) / len(flags)

    near = 0.03
    assert share([len(w.groups) == 1 for w in wanteds]) == pytest.approx(0.55, abs=near)
    assert share([w.background is not None for w in wanteds]) == pytest.approx(0.8, abs=near)
    assert share([g.size is not None for g in groups]) == pytest.approx(0.3, abs=near)
    assert share([g.position is not None for g in singles]) == pytest.approx(0.35, abs=near)
    assert share([w.relation is not None for w in pairs]) == pytest.approx(0.5, abs=near)
