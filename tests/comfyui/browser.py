"""ComfyUI's real frontend in Chromium, on a real ComfyUI server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import comfy_env

SCREENSHOTS = comfy_env.REPOSITORY / "build" / "screenshots"
"""Where every state is kept for people to look at."""

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def why_not() -> str | None:
    """Why no browser can be driven here, if so; an error where one has to be."""
    reason = _missing()
    if reason and os.environ.get("REQUIRE_BROWSER"):
        raise RuntimeError(reason)
    return reason


def _missing() -> str | None:
    if chromium() is None:
        return "needs Chromium: install the package chromium, or set CHROMIUM"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs the Python package playwright"
    return None


def chromium() -> str | None:
    """The browser's path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


class Canvas:
    """A page with ComfyUI in it.

    Parameters
    ----------
    browser
        Playwright's.
    server
        A `comfy_server.ComfyUIServer`.
    renderer
        "canvas" or "vue".
    """

    def __init__(self, browser, server, renderer: str, locale: str = "en") -> None:
        self.server = server
        self.renderer = renderer
        self.errors: list[str] = []
        context = browser.new_context(viewport={"width": 1280, "height": 860})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        for name, value in {
            "Comfy.TutorialCompleted": True,
            "Comfy.InstalledVersion": "9.9.9",
            "Comfy.VueNodes.Enabled": renderer == "vue",
            "Comfy.VueNodes.AutoScaleLayout": False,
            "Comfy.Locale": locale,
            "Comfy.Minimap.Visible": False,
            "LiteGraph.Canvas.MinFontSizeForLOD": 0,
            # A page that is loaded again shows the same workflow.
            "Comfy.Workflow.Persist": True,
        }.items():
            server.post(f"/settings/{name}", value)
        self.open()

    def open(self) -> None:
        """Load the page."""
        self.page.goto(self.server.url, wait_until="domcontentloaded")
        self.page.wait_for_function(
            "() => window.app?.graph && window.LiteGraph?.registered_node_types"
            "?.QwenImage21GraphCache && document.querySelector('canvas')",
            timeout=60000,
        )
        self.page.wait_for_timeout(1200)

    def run(self, script: str, argument=None):
        """Evaluate a function of the page."""
        return self.page.evaluate(script, argument)

    def clear(self) -> None:
        """An empty canvas at scale 1."""
        self.run(
            "() => { app.graph.clear(); app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; }"
        )

    def add(self, kind: str, at=(80, 120), **values) -> str:
        """Add a node; its id."""
        made = self.run(
            """([kind, at, values]) => {
                const node = LiteGraph.createNode(kind);
                node.pos = at;
                app.graph.add(node);
                for (const [name, value] of Object.entries(values)) {
                    const widget = node.widgets.find((one) => one.name === name);
                    widget.value = value;
                    widget.callback?.(value);
                }
                return String(node.id);
            }""",
            [kind, list(at), values],
        )
        self.page.wait_for_timeout(250)
        return made

    def connect(self, source: str, slot: int, target: str, name: str) -> None:
        """Connect an output to an input by its name."""
        done = self.run(
            """([source, slot, target, name]) => {
                const [from, to] = [source, target].map((id) => app.graph.getNodeById(Number(id)));
                return !!from.connect(slot, to, to.findInputSlot(name));
            }""",
            [source, slot, target, name],
        )
        assert done, (source, target, name)

    def tell(self, node: str, **content) -> None:
        """Send what a machine with a GPU would send."""
        data = {"node": node, "line": "", **content}
        self.server.post("/test/event", {"type": "qwen_image_graph.status", "data": data})
        self.page.wait_for_timeout(250)

    def readout(self, index: int = 0):
        """A readout on the page."""
        return self.page.locator(".qig").nth(index)

    def picture(self, name: str) -> Path:
        """Keep what is to be seen."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}_{self.renderer}.png"
        self.page.screenshot(path=path)
        return path


def inside(canvas, readout):
    """All of the readout is within its node: nothing is cut off or overlaps what is below."""
    bounds = canvas.run(
        """() => {
            const node = app.graph.nodes.find((one) => one.qigReadout);
            const scale = app.canvas.ds.scale;
            const top = node.pos[1] + app.canvas.ds.offset[1];
            const host = app.canvas.canvas.getBoundingClientRect().top;
            return [host + (top - 40) * scale, host + (top + node.size[1] + 4) * scale];
        }"""
    )
    box = readout.bounding_box()
    assert box["y"] >= bounds[0] and box["y"] + box["height"] <= bounds[1] + 1, (box, bounds)
