"""Caches broken on purpose: each fault changes the picture, and the equality test sees it.

Four ways in which a prefix cache can be wrong are done to the real buffers, by changing what fills
them. The helper that finds the intact cache's picture equal to the pipeline's own then has to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from examples.tiny.captions import parse
from examples.tiny.checker import Verdict, check, check_scene
from examples.tiny.scenes import SIDE, Background, Item, Scene, draw
from graph_cache import GraphCache, Path
from graph_cache.demo_pipeline import load_small
from graph_cache.entries import Entry
from graph_cache.prefix import PrefixBuffers

STEPS = 8
LEAST = 2
"""Mean absolute difference of the channels, of 255, that counts as another picture."""

CIRCLES = "two red circles on a blue striped background"
STARS = "three green stars on a pink dotted background"
"""As many words: its prefix fits the same buffers."""
RECOLOUR = "make the red circle green"
LEFT = Scene((Item("circle", "red", "large", (1, 0), 36),), Background("white"))
RIGHT = Scene(
    (
        Item("circle", "red", "small", (0, 2), 24),
        Item("square", "blue", "large", (2, 1), 36),
    ),
    Background("yellow", "checkered"),
)
RIGHT_RECOLOURED = Scene(
    (Item("circle", "green", "small", (0, 2), 24), RIGHT.items[1]), RIGHT.background
)


# --- the faults -------------------------------------------------------------------------------

Fill = Callable[[int, torch.Tensor, torch.Tensor], None]


@contextmanager
def _filled_by(buffers: PrefixBuffers, fill: Fill) -> Iterator[None]:
    """Let a prefill's K/V of a layer go to `fill` instead of these buffers' own `store`."""
    buffers.store = fill
    try:
        yield
    finally:
        del buffers.store


def wrong_layer(entries: list[Entry]) -> AbstractContextManager:
    """The first and the last layer's prefixes are exchanged."""
    (entry,) = entries
    store, last = entry.buffers.store, entry.buffers.shape.layers - 1
    other = {0: last, last: 0}
    return _filled_by(
        entry.buffers, lambda layer, key, value: store(other.get(layer, layer), key, value)
    )


def stale_prompt(entries: list[Entry]) -> AbstractContextManager:
    """The buffers keep what the run before left: the prefix of another prompt."""
    (entry,) = entries
    return _filled_by(entry.buffers, lambda layer, key, value: None)


def stale_reference(entries: list[Entry]) -> AbstractContextManager:
    """The text's K/V are new, the reference's are those of the run before."""
    (entry,) = entries
    store, layout = entry.buffers.store, entry.key.layout
    start = layout.text_runs[0]
    kept = slice(start, start + layout.reference_tokens)

    def fill(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        old = [part[:, kept].clone() for part in entry.buffers.prefix(layer)]
        store(layer, key, value)
        for part, before in zip(entry.buffers.prefix(layer), old):
            part[:, kept] = before

    return _filled_by(entry.buffers, fill)


@contextmanager
def swapped_conditionings(entries: list[Entry]) -> Iterator[None]:
    """The positive prompt's prefix is where the negative one's belongs, and the other way round."""
    positive, negative = (entry.buffers for entry in entries)
    stores = positive.store, negative.store
    with ExitStack() as both:
        both.enter_context(_filled_by(positive, stores[1]))
        both.enter_context(_filled_by(negative, stores[0]))
        yield


# --- the pictures -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is asked of the pipeline, and of it before; a fault; and how the picture is judged."""

    fault: Callable[[list[Entry]], AbstractContextManager]
    asked: dict
    before: dict
    judge: Callable[[np.ndarray], Verdict]


def _shows_circles(rgba: np.ndarray) -> Verdict:
    return check(rgba, parse(CIRCLES))


def _edit(scene: Scene) -> dict:
    return {"prompt": RECOLOUR, "image": [Image.fromarray(draw(scene))]}


GUIDED = {"prompt": CIRCLES, "negative_prompt": STARS, "true_cfg_scale": 1.5}
CASES = {
    "wrong layer": Case(wrong_layer, {"prompt": CIRCLES}, {"prompt": CIRCLES}, _shows_circles),
    "stale prompt": Case(stale_prompt, {"prompt": CIRCLES}, {"prompt": STARS}, _shows_circles),
    "stale reference": Case(
        stale_reference,
        _edit(RIGHT),
        _edit(LEFT),
        lambda rgba: check_scene(rgba, RIGHT_RECOLOURED),
    ),
    "swapped conditionings": Case(swapped_conditionings, GUIDED, GUIDED, _shows_circles),
}


@dataclass(frozen=True)
class Pictures:
    """A case's picture from the pipeline alone, the cache, the broken one, and it again, mended."""

    case: Case
    stock: np.ndarray
    intact: np.ndarray
    broken: np.ndarray
    mended: np.ndarray


@pytest.fixture(scope="module")
def small(model_folder):
    pipe = load_small(model_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module", params=CASES)
def pictures(request, small) -> Pictures:
    case = CASES[request.param]

    def make(asked: dict) -> np.ndarray:
        image = small(
            **asked,
            height=SIDE,
            width=SIDE,
            output_resolution=SIDE,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        return np.asarray(image)

    stock = make(case.asked)
    # Unverified: the comparison reads the same buffers, so none of the faults would show in it.
    with GraphCache.attach(
        small.transformer, mode="buffers", verify="never", headroom_bytes=0
    ) as cache:

        def make_with_the_cache() -> np.ndarray:
            image = make(case.asked)
            report = cache.report()
            # Otherwise it was the model's own path that made the picture.
            assert report.path is Path.BUFFERS
            assert report.counts["prefill"] == len(entries)
            assert report.eager_reasons == {"mode_buffers": (STEPS - 1) * len(entries)}
            assert list(cache._dispatcher.store) == entries
            return image

        make(case.before)
        entries = list(cache._dispatcher.store)
        intact = make_with_the_cache()
        make(case.before)
        with case.fault(entries):
            broken = make_with_the_cache()
        mended = make_with_the_cache()
    return Pictures(case, stock, intact, broken, mended)


def assert_same_picture(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.array_equal(ours, theirs), f"they differ by {difference(ours, theirs):.2f} of 255"


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours.astype(int) - theirs).mean())


# --- the tests --------------------------------------------------------------------------------


def test_the_intact_cache_gives_the_pipelines_picture(pictures):
    assert_same_picture(pictures.intact, pictures.stock)


def test_the_equality_test_fails_on_a_broken_cache(pictures):
    with pytest.raises(AssertionError):
        assert_same_picture(pictures.broken, pictures.stock)


def test_a_broken_cache_makes_another_picture(pictures, trained):
    changed = difference(pictures.broken, pictures.stock)
    assert changed > LEAST


def test_the_cache_is_whole_again_without_the_fault(pictures):
    assert_same_picture(pictures.mended, pictures.stock)


def test_the_checker_finds_the_broken_caches_picture_wrong(pictures, trained):
    stock, broken = (pictures.case.judge(p) for p in (pictures.stock, pictures.broken))
    assert stock.all, stock
    assert not broken.all, broken
