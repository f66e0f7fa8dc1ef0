"""The checker sees what was drawn, through blur and noise, and what is wrong with it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from examples.tiny.captions import parse, random_wanted, scene_of
from examples.tiny.checker import check, check_scene, see, summary
from examples.tiny.components import components
from examples.tiny.edits import random_edit
from examples.tiny.scenes import COLOURS, RADII, SHAPES, Background, Item, Scene, draw

MANY = 400
WHITE = Background("white")
SCENE = Scene(
    (
        Item("circle", "red", "large", (0, 0), 36),
        Item("circle", "red", "large", (1, 1), 34),
        Item("letter E", "blue", "small", (2, 2), 23, (4, -5)),
    ),
    Background("yellow", "striped"),
)
WANTED = parse(
    "two large red circles and a blue letter E at the bottom right on a yellow striped background"
)


def _rng(seed: int = 0) -> random.Random:
    return random.Random(seed)  # noqa: S311 (pictures, not secrets)


def _worn(rgba: np.ndarray, noise: np.random.Generator, blur=1.5, sigma=8.0, shift=0.0):
    """Blurred, noisy and with each channel off by as much as `shift`."""
    channels = [Image.fromarray(rgba[..., k]) for k in range(4)]
    soft = [np.asarray(c.filter(ImageFilter.GaussianBlur(blur))) for c in channels]
    worn = np.stack(soft, -1) + sigma * noise.standard_normal(rgba.shape, np.float32)
    worn[..., :3] += noise.uniform(-shift, shift, 3)
    return np.clip(np.rint(worn), 0, 255).astype(np.uint8)


def _rights(wear, number: int = MANY) -> dict[str, float]:
    rng = _rng(11)
    verdicts = []
    for k in range(number):
        wanted = random_wanted(rng, k % 2 == 0)
        scene = scene_of(wanted, rng)
        seen = wear(draw(scene))
        verdicts += [check(seen, wanted), check_scene(seen, scene)]
    return summary(verdicts)


def _with(changed: int, **changes) -> Scene:
    items = list(SCENE.items)
    items[changed] = replace(items[changed], **changes)
    return replace(SCENE, items=tuple(items))


def test_clean_pictures_are_right():
    assert _rights(lambda rgba: rgba)["all"] >= 0.995


def test_blurred_noisy_pictures_are_right():
    noise = np.random.default_rng(0)
    assert _rights(lambda rgba: _worn(rgba, noise))["all"] >= 0.98


def test_pictures_of_shifted_colours_are_right():
    noise = np.random.default_rng(1)
    rights = _rights(lambda rgba: _worn(rgba, noise, blur=2.0, shift=25), MANY // 2)
    assert rights["all"] >= 0.97
    assert min(rights["shapes"], rights["colours"]) >= 0.99


def test_edited_pictures_are_right_and_their_references_wrong():
    rng = _rng(3)
    for _ in range(MANY // 4):
        edit = random_edit(rng)
        assert check_scene(draw(edit.result), edit.result).all
        assert not check_scene(draw(edit.references[-1]), edit.result).all


@pytest.mark.parametrize("size", RADII)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_seen_where_it_is(shape, size):
    for colour in COLOURS:
        item = Item(shape, colour, size, (2, 0), RADII[size][0], (2, -1))
        (seen,) = see(draw(Scene((item,), Background("grey", "checkered")))).items
        assert (seen.shape, seen.colour, seen.size, seen.cell) == (shape, colour, size, (2, 0))
        assert np.hypot(*np.subtract(seen.centre, item.centre)) < 0.35 * item.radius
        assert 0.88 < seen.score <= 1


def test_the_right_picture_has_every_part_right():
    for verdict in (check(draw(SCENE), WANTED), check_scene(draw(SCENE), SCENE)):
        assert verdict.all
        assert verdict.shapes == verdict.colours == verdict.counts == 1
        assert verdict.positions == verdict.sizes == 1
        assert verdict.background is True


@pytest.mark.parametrize(
    ("scene", "wrong"),
    [
        (_with(0, colour="green"), {"colours": 2 / 3}),
        (_with(0, shape="heart"), {"shapes": 2 / 3}),
        (_with(2, cell=(2, 1)), {"positions": 0}),
        (_with(0, size="small", radius=25), {"sizes": 1 / 2}),
        (
            replace(SCENE, items=SCENE.items[1:]),
            {"shapes": 2 / 3, "colours": 2 / 3, "counts": 1 / 2, "sizes": 1 / 2},
        ),
        (
            replace(SCENE, items=(*SCENE.items, replace(SCENE.items[0], cell=(0, 2)))),
            {"counts": 0.5},
        ),
        (replace(SCENE, background=Background("yellow", "dotted")), {"background": False}),
        (replace(SCENE, background=Background("green", "striped")), {"background": False}),
        (replace(SCENE, background=Background("transparent")), {"background": False}),
    ],
)
def test_each_fault_is_seen_and_only_that(scene, wrong):
    verdict = check(draw(scene), WANTED)
    assert not verdict.all
    for part in ("shapes", "colours", "counts", "positions", "sizes", "background"):
        assert getattr(verdict, part) == pytest.approx(wrong.get(part, 1)), part
    assert not check_scene(draw(scene), SCENE).all


def test_a_scene_asks_for_every_cell():
    verdict = check_scene(draw(_with(0, cell=(1, 0))), SCENE)
    assert verdict.positions == pytest.approx(2 / 3)
    assert verdict.shapes == verdict.colours == verdict.counts == 1
    assert not verdict.all


def test_exchanged_colours_are_not_right():
    scene = Scene(
        (Item("circle", "red", "small", (0, 0), 24), Item("square", "blue", "small", (0, 1), 24)),
        WHITE,
    )
    verdict = check(draw(scene), parse("a blue circle and a red square"))
    assert (verdict.shapes, verdict.colours, verdict.counts) == (1, 0, 1)
    assert verdict.positions is verdict.sizes is verdict.background is None
    assert not verdict.all


@pytest.mark.parametrize("relation", ["left of", "right of", "above", "below"])
def test_relations(relation):
    scene = Scene(
        (Item("ring", "green", "small", (2, 0), 24), Item("star", "black", "small", (0, 1), 24)),
        WHITE,
    )
    verdict = check(draw(scene), parse(f"a green ring {relation} a black star"))
    assert verdict.all == (relation in ("left of", "below")) == (verdict.positions == 1)


def test_more_objects_than_asked_for_are_not_right():
    scene = replace(SCENE, items=(*SCENE.items, Item("star", "black", "small", (2, 0), 24)))
    assert not check(draw(scene), WANTED).all
    assert check(draw(scene), WANTED).counts == 0.5


def test_a_picture_of_nothing_has_nothing_right():
    verdict = check(draw(Scene((), Background("pink"))), parse("a red star"))
    assert (verdict.shapes, verdict.colours, verdict.counts, verdict.all) == (0, 0, 0, False)


def test_items_that_run_into_each_other_are_told_apart():
    items = (SCENE.items[0], Item("square", "red", "large", (0, 1), 35))
    rgba = draw(Scene(items, WHITE))
    rgba[38:48, 60:110] = (*COLOURS["red"], 255)
    assert len(components(rgba[..., 1] < 128)) == 1
    assert [item.cell for item in see(rgba).items] == [(0, 0), (0, 1)]


def test_something_else_is_no_shape():
    rgba = draw(Scene((), WHITE))
    rgba[40:48, 30:110] = rgba[40:90, 30:38] = rgba[82:90, 30:110] = (*COLOURS["black"], 255)
    (item,) = see(rgba).items
    assert item.shape == "unknown"
    assert item.colour == "black"


def test_noise_and_wrong_sizes_do_not_break_it():
    noise = np.random.default_rng(2).integers(0, 256, (256, 256, 4), np.uint8)
    assert not check(noise, WANTED).all
    black = np.zeros((256, 256, 4), np.uint8)
    black[..., 3] = 255
    assert see(black).background is None
    assert see(np.zeros_like(black)).background == Background("transparent")
    with pytest.raises(ValueError, match="uint8"):
        see(black[:128])


def test_components_are_those_of_a_flood_fill():
    noise = np.random.default_rng(3)
    for share in (0.2, 0.5, 0.6, 0.9):
        binary = noise.random((19, 23)) < share
        parts = components(binary)
        assert {frozenset(part.tolist()) for part in parts} == _flooded(binary)
    assert components(np.zeros((4, 5), bool)) == []


def _flooded(binary: np.ndarray) -> set[frozenset[int]]:
    left = {tuple(at) for at in np.argwhere(binary).tolist()}
    found = set()
    while left:
        part, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            part.add(y * binary.shape[1] + x)
            for at in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if at in left:
                    left.remove(at)
                    edge.append(at)
        found.add(frozenset(part))
    return found


def test_a_summary_leaves_out_what_was_not_said():
    right = check(draw(SCENE), WANTED)
    unsaid = check(draw(SCENE), parse("two red circles and a blue letter T"))
    means = summary([right, unsaid])
    assert means["shapes"] == pytest.approx((1 + 2 / 3) / 2)
    assert means["background"] == 1
    assert means["all"] == 0.5
    assert "sizes" not in summary([unsaid])
