"""Scenes and their drawing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from examples.tiny.scenes import (
    BACKGROUNDS,
    CENTRES,
    COLOURS,
    JITTER,
    PATTERNS,
    RADII,
    SHAPES,
    SIDE,
    TINTS,
    Background,
    Item,
    Scene,
    draw,
    ground,
    mask,
    picture,
)

ITEM = Item("circle", "red", "large", (1, 1), 36)


@pytest.mark.parametrize("colour", BACKGROUNDS)
def test_a_picture_is_rgba_bytes_and_the_same_each_time(colour):
    scene = Scene((ITEM, Item("star", "black", "small", (0, 2), 23, (3, -5))), Background(colour))
    first = draw(scene)
    assert first.dtype == np.uint8
    assert first.shape == (SIDE, SIDE, 4)
    assert np.array_equal(first, draw(scene))
    assert np.array_equal(first, np.asarray(picture(scene)))


def test_drawing_leaves_the_cached_background_alone():
    background = Background("blue", "dotted")
    before = ground(background).copy()
    drawn = draw(Scene((ITEM,), background))
    drawn[:] = 0
    assert np.array_equal(before, ground(background))


def test_only_items_are_opaque_on_a_transparent_background():
    drawn = draw(Scene((ITEM,), Background("transparent")))
    assert (drawn[128, 128] == (*COLOURS["red"], 255)).all()
    outside = drawn[..., 3] == 0
    assert 0.9 < outside.mean() < 1
    assert (drawn[outside][:, :3] == 255).all()


def test_edges_are_a_mix_of_item_and_background():
    drawn = draw(Scene((ITEM,), Background("white"))).reshape(-1, 4)
    assert (drawn[:, 3] == 255).all()
    levels = Counter(drawn[:, 1].tolist())
    assert levels[COLOURS["red"][1]] > 3500
    assert len(levels) > 10
    assert min(levels) == COLOURS["red"][1]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_lies_within_its_radius_and_is_told_from_the_others(shape):
    for low, high in RADII.values():
        for radius in range(low, high + 1):
            coverage = mask(shape, radius)
            assert coverage.shape == (2 * radius + 2,) * 2
            assert coverage.max() == 256
            # The rim is there for what Pillow's polygons spill: an eighth of a pixel.
            rim = np.concatenate([coverage[[0, -1]].ravel(), coverage[:, [0, -1]].ravel()])
            assert rim.max() <= 256 // 8
    mine = mask(shape, 24) > 128
    for other in SHAPES:
        theirs = mask(other, 24) > 128
        assert other == shape or (mine & theirs).sum() < 0.86 * (mine | theirs).sum()


def test_items_of_neighbouring_cells_never_touch():
    gap = CENTRES[1] - CENTRES[0]
    reach = max(RADII[size][1] + JITTER[size] for size in RADII)
    assert gap - 2 * reach >= 5
    assert CENTRES[0] - reach >= 1


def test_object_colours_background_tones_and_each_other_are_far_apart():
    objects = np.array(list(COLOURS.values()), float)
    tones = np.array(list(TINTS.values()), float).reshape(-1, 3)
    between = np.linalg.norm(objects[:, None] - objects, axis=-1)
    assert between[between > 0].min() > 90
    assert np.linalg.norm(objects[:, None] - tones, axis=-1).min() > 120
    mains = tones[::2]
    apart = np.linalg.norm(mains[:, None] - mains, axis=-1)
    assert apart[apart > 0].min() > 60


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_repeat_every_32_px_in_two_tones(pattern):
    drawn = ground(Background("pink", pattern))
    period = 64 if pattern == "checkered" else 32
    assert np.array_equal(drawn[:, period:], drawn[:, :-period])
    tones = {tuple(tone) for tone in drawn[..., :3].reshape(-1, 3).tolist()}
    expected = TINTS["pink"] if pattern != "plain" else TINTS["pink"][:1]
    assert tones >= set(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": "hexagon"},
        {"colour": "pink"},
        {"size": "medium"},
        {"radius": 30},
        {"offset": (0, 3)},
        {"cell": (0, 3)},
    ],
)
def test_items_that_cannot_be_drawn_are_refused(changes):
    with pytest.raises(ValueError):
        replace(ITEM, **changes)


def test_scenes_that_cannot_be_drawn_are_refused():
    with pytest.raises(ValueError, match="one cell"):
        Scene((ITEM, ITEM), Background("white"))
    items = tuple(replace(ITEM, cell=(k // 3, k % 3)) for k in range(6))
    with pytest.raises(ValueError, match="at most 5"):
        Scene(items, Background("white"))
    with pytest.raises(ValueError, match="no pattern"):
        Background("transparent", "dotted")
