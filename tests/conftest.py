"""Fixtures on the real model and the real pipeline, small, with random weights."""

from __future__ import annotations

import pytest
import torch
from helpers import FakeCapturer, forget_verified

from graph_cache import GraphCache
from graph_cache.tiny import tiny_pipeline, tiny_transformer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; none is visible to torch")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_grad():
    """The pipeline runs without gradients; so do the tests that call the model directly."""
    forget_verified()
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return tiny_transformer()


@pytest.fixture
def pipe():
    return tiny_pipeline()


@pytest.fixture
def attach():
    """`GraphCache.attach` without headroom, every step compared; detached at the end."""
    caches = []

    def make(model, **options):
        options = {"headroom_bytes": 0, "verify": "always", **options}
        cache = GraphCache.attach(model, **options)
        caches.append(cache)
        return cache

    yield make
    for cache in caches:
        cache.detach()


@pytest.fixture
def capturer():
    return FakeCapturer()
