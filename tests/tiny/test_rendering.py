import random

import numpy as np
import torch

from examples.tiny.captions import random_wanted, scene_of
from examples.tiny.edits import random_edit
from examples.tiny.outlines import SHAPES
from examples.tiny.rendering import Renderer, row, rows
from examples.tiny.scenes import COLOURS, RADII, Background, Item, Scene, draw


def test_it_draws_what_scenes_draw():
    rng = random.Random(3)  # noqa: S311
    scenes = [scene_of(random_wanted(rng, False), rng) for _ in range(150)]
    for edit in [random_edit(rng) for _ in range(50)]:
        scenes += [*edit.references, edit.result]
    scenes += [Scene((), Background("transparent")), Scene((), Background("pink"))]
    made = Renderer("cpu")(rows(scenes)).numpy()
    assert np.array_equal(made, np.stack([draw(scene) for scene in scenes]))


def test_every_shape_radius_and_ground():
    scenes = []
    for background in (Background("transparent"), Background("grey", "dotted")):
        for index, shape in enumerate(SHAPES):
            for size, (low, high) in RADII.items():
                for radius in range(low, high + 1):
                    colour = list(COLOURS)[(index + radius) % len(COLOURS)]
                    item = Item(shape, colour, size, (radius % 3, index % 3), radius, (1, -2))
                    scenes.append(Scene((item,), background))
    made = Renderer("cpu")(rows(scenes)).numpy()
    assert np.array_equal(made, np.stack([draw(scene) for scene in scenes]))


def test_rows_fit_their_dtype():
    rng = random.Random(4)  # noqa: S311
    scene = scene_of(random_wanted(rng, False), rng)
    assert rows([scene]).tolist() == [row(scene)]
    assert torch.equal(Renderer("cpu")(rows([scene])), Renderer("cpu")(rows([scene]).int()))
