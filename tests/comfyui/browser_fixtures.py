"""Fixtures of the tests in a browser: a server, a browser, a page in each renderer."""

import browser as browsers
import comfy_env
import pytest

MARKS = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(bool(browsers.why_not()), reason=str(browsers.why_not())),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if comfy_env.why_not():
        pytest.skip(comfy_env.why_not())
    from comfy_server import ComfyUIServer

    with ComfyUIServer(tmp_path_factory.mktemp("comfyui")) as running:
        yield running


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=browsers.chromium(), args=list(browsers._FLAGS)
        )
        yield started
        started.close()


@pytest.fixture(scope="module", params=["canvas", "vue"])
def canvas(request, server, chromium):
    return browsers.Canvas(chromium, server, request.param)


@pytest.fixture(autouse=True)
def _empty(canvas):
    canvas.clear()
    canvas.errors.clear()
    yield
    ours = [error for error in canvas.errors if "qwen" in error or "qig" in error]
    assert not ours, ours
