"""The example workflows: they load whole in the real frontend, and the server takes them."""

import json
import os
import subprocess
import sys

import browser as browsers
import comfy_env
import pytest

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(bool(browsers.why_not()), reason=str(browsers.why_not())),
]

FOLDER = comfy_env.REPOSITORY / "example_workflows"
FILES = sorted(FOLDER.glob("*.json"))
OURS = "QwenImage21"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if comfy_env.why_not():
        pytest.skip(comfy_env.why_not())
    from comfy_server import ComfyUIServer

    base = tmp_path_factory.mktemp("comfyui")
    with ComfyUIServer(base) as running:
        # Files of the names that the workflows ask for; nothing here loads them.
        for kind, names in {
            "diffusion_models": ["qwen_image_2.1", "qwen_image_2.1_turbo"],
            "text_encoders": ["qwen3vl_8b"],
        }.items():
            folder = base / "models" / kind
            folder.mkdir(exist_ok=True)
            for name in names:
                (folder / f"{name}_int8_convrot.safetensors").touch()
        (base / "models" / "vae").mkdir(exist_ok=True)
        (base / "models" / "vae" / "qwen_image_2.1_vae_bf16.safetensors").touch()
        from PIL import Image

        Image.new("RGB", (64, 64), "teal").save(base / "input" / "example.png")
        yield running


@pytest.fixture(scope="module")
def canvas(server):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=browsers.chromium(), args=list(browsers._FLAGS)
        )
        yield browsers.Canvas(started, server, "canvas")
        started.close()


def test_they_are_as_the_script_writes_them(tmp_path):
    script = comfy_env.REPOSITORY / "tools" / "make_example_workflows.py"
    copy = tmp_path / "tools" / script.name
    copy.parent.mkdir()
    copy.write_text(script.read_text())
    (tmp_path / "example_workflows").mkdir()
    subprocess.run([sys.executable, str(copy)], check=True)
    written = {file.name: file.read_text() for file in (tmp_path / "example_workflows").iterdir()}
    assert written == {file.name: file.read_text() for file in FILES}


def test_each_has_a_thumbnail():
    assert len(FILES) == 4
    for file in FILES:
        assert file.with_suffix(".jpg").stat().st_size < 150_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_whole_and_is_taken(canvas, server, file):
    workflow = json.loads(file.read_text())
    canvas.clear()
    canvas.errors.clear()
    found = canvas.run(
        """async (workflow) => {
            await app.loadGraphData(workflow);
            const nodes = app.graph.nodes;
            return {
                missing: nodes.filter((n) => !(n.type in LiteGraph.registered_node_types))
                    .map((n) => n.type),
                links: Object.keys(Object.fromEntries(app.graph.links)).length,
                values: Object.fromEntries(nodes.map((n) => [n.id, n.widgets_values])),
                prompt: (await app.graphToPrompt()).output,
            };
        }""",
        workflow,
    )
    canvas.page.wait_for_timeout(700)
    assert found["missing"] == []
    assert found["links"] == len(workflow["links"])
    dialogs = canvas.page.locator("[role=dialog]:visible").all_text_contents()
    assert not [text for text in dialogs if "issing" in text]
    canvas.run("() => app.canvas.ds && app.canvas.fitViewToSelectionAnimated?.()")
    canvas.page.wait_for_timeout(900)
    picture = canvas.picture(f"example_{file.stem}")
    if os.environ.get("WRITE_THUMBNAILS"):
        from PIL import Image

        whole = Image.open(picture).convert("RGB")
        whole.crop((60, 95, whole.width - 10, whole.height - 40)).save(
            file.with_suffix(".jpg"), quality=80
        )
    # The server looks over everything before it runs anything.
    answer = server.post("/prompt", {"prompt": found["prompt"], "client_id": "examples"})
    assert answer["node_errors"] == {}
    server.post("/interrupt", {})
    for node in workflow["nodes"]:
        if not node["type"].startswith(OURS):
            continue
        inputs = found["prompt"][str(node["id"])]["inputs"]
        values = [value for value in inputs.values() if not isinstance(value, list)]
        saved = [value for value in node["widgets_values"] if value not in ("randomize", "fixed")]
        assert values == saved
