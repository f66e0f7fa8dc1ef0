"""Fixtures on a real ComfyUI: its ModelPatcher, its samplers, and a small model in them."""

from __future__ import annotations

import comfy_env
import pytest
from helpers import FakeCapturer, forget_verified

from graph_cache import pace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why, where there is no ComfyUI."""
    reason = comfy_env.why_not()
    native = reason or (
        None
        if comfy_env.has_native_model()
        else "this ComfyUI has no Qwen-Image-2.1; set COMFYUI_PATH to version 0.36 or newer"
    )
    for item in items:
        if "tests/comfyui" not in item.path.as_posix():
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif native and item.get_closest_marker("comfyui"):
            item.add_marker(pytest.mark.skip(reason=native))


@pytest.fixture(autouse=True)
def _each_test_is_a_process():
    forget_verified()
    pace._native.clear()
    comfy_env.load()


@pytest.fixture(
    params=["standin", pytest.param("native", marks=pytest.mark.comfyui)],
)
def kind(request):
    """The stand-in, and ComfyUI's own model where it has one."""
    return request.param


@pytest.fixture
def bench(kind):
    """A workbench with one model on it."""
    from workbench import Workbench

    return Workbench(kind)


@pytest.fixture
def capturer():
    return FakeCapturer()
