"""Layouts and keys: what may share buffers and graphs, and what must not."""

import dataclasses

import pytest
import torch
from helpers import ONE_REFERENCE, ONE_REFERENCE_TURNED, TEXT

from graph_cache.layout import CacheKey, SequenceLayout

KEY = CacheKey(TEXT, 1, torch.bfloat16, torch.device("cpu"), (1536, 64, 1), "native", ("ieee",))


def test_token_counts():
    layout = SequenceLayout((2, 0, 5), ((1, 4, 6), (1, 2, 2)), (1, 8, 4))
    assert layout.reference_tokens == 28
    assert layout.prefix_tokens == 35
    assert layout.target_tokens == 32
    assert len(layout.image_mask()) == 67
    assert sum(layout.image_mask()) == 60


def test_the_image_mask_follows_the_sequence():
    layout = SequenceLayout((1, 2), ((1, 1, 2),), (1, 1, 1))
    assert layout.image_mask() == [False, True, True, False, False, True]


def test_equal_counts_of_different_grids_are_different_layouts():
    assert ONE_REFERENCE.prefix_tokens == ONE_REFERENCE_TURNED.prefix_tokens
    assert ONE_REFERENCE != ONE_REFERENCE_TURNED
    assert dataclasses.replace(KEY, layout=ONE_REFERENCE) != dataclasses.replace(
        KEY, layout=ONE_REFERENCE_TURNED
    )


def test_equal_counts_with_references_at_other_slots_are_different_layouts():
    grids = ((1, 2, 2),)
    early = SequenceLayout((1, 4), grids, (1, 4, 4))
    late = SequenceLayout((4, 1), grids, (1, 4, 4))
    assert early.prefix_tokens == late.prefix_tokens
    assert early != late


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"dtype": torch.float16},
        {"device": torch.device("cuda", 0)},
        {"attention": "_native_cudnn"},
        {"strides": (1536, 1, 24)},
        {"settings": ("tf32",)},
        {"layout": ONE_REFERENCE},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_key_counts(change):
    assert dataclasses.replace(KEY, **change) != KEY
    assert hash(dataclasses.replace(KEY)) == hash(KEY)


@pytest.mark.parametrize(
    ("runs", "references", "target", "message"),
    [
        ((1,), ((1, 2, 2),), (1, 2, 2), "text runs do not fit"),
        ((-1,), (), (1, 2, 2), "negative"),
        ((1,), (), (1, 0, 2), "empty image"),
    ],
)
def test_impossible_layouts_are_refused(runs, references, target, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(runs, references, target)
