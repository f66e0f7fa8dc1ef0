"""The readout on a canvas: saved, copied, in subgraphs, in real runs, in any theme and language."""

import json

import browser as browsers
import pytest
from browser_fixtures import MARKS, _empty, canvas, chromium, server  # noqa: F401
from browser_reports import STATES, report

pytestmark = MARKS


def test_the_readout_stays_out_of_workflow_and_prompt(canvas):
    node = canvas.add("QwenImage21GraphCache", mode="buffers", min_steps=5)
    model = canvas.add("TestStandInModel", at=(80, 500))
    canvas.connect(model, 0, node, "model")
    canvas.tell(node, report=report())
    saved = canvas.run("() => app.graph.serialize()")
    mine = next(one for one in saved["nodes"] if str(one["id"]) == node)
    assert mine["widgets_values"] == ["buffers", "first", False, 0, 5]
    prompt = canvas.run("async () => (await app.graphToPrompt()).output")
    assert set(prompt[node]["inputs"]) == {
        *("mode", "model", "verify", "keep_between_runs", "max_vram_gb", "min_steps")
    }
    # Loaded again, it is saved unchanged.
    again = canvas.run(
        "async (saved) => { await app.loadGraphData(saved); return app.graph.serialize(); }", saved
    )
    for workflow in (saved, again):
        for one in workflow["nodes"]:
            one.pop("order", None)
    for was, now in zip(saved["nodes"], again["nodes"]):
        assert {k: (was.get(k), now.get(k)) for k in {*was, *now} if was.get(k) != now.get(k)} == {}
    assert again["links"] == saved["links"]


def test_a_copied_node_starts_afresh(canvas):
    node = canvas.add("QwenImage21GraphCache")
    canvas.tell(node, report=report())
    copy = canvas.run(
        """() => {
            const copy = app.graph.nodes[0].clone();
            copy.pos = [600, 120];
            app.graph.add(copy);
            return String(copy.id);
        }"""
    )
    canvas.page.wait_for_timeout(300)
    badges = canvas.page.locator(".qig-badge")
    assert sorted(badges.all_text_contents()) == ["Ready", "Replaying"]
    canvas.tell(copy, report=STATES["buffers"][0])
    assert sorted(badges.all_text_contents()) == ["Buffers", "Replaying"]
    canvas.picture("two_nodes")


def test_a_node_in_a_subgraph_is_found(canvas):
    canvas.add("QwenImage21GraphCache")
    outer = canvas.run(
        """() => {
            const { node } = app.graph.convertToSubgraph(new Set([app.graph.nodes[0]]));
            return String(node.id);
        }"""
    )
    find = "app.graph.getNodeById(Number(id)).subgraph.nodes[0]"
    inner = canvas.run(f"(id) => String({find}.id)", outer)
    badge = f"(id) => {find}.qigReadout.badge.textContent"
    canvas.tell(inner, report=STATES["buffers"][0])
    assert canvas.run(badge, outer) == "Ready"
    canvas.tell(f"{outer}:{inner}", report=report())
    assert canvas.run(badge, outer) == "Replaying"


def test_the_report_can_be_copied_and_memory_released(canvas):
    node = canvas.add("QwenImage21GraphCache")
    content = report()
    canvas.tell(node, report=content)
    readout = canvas.readout()
    readout.locator(".qig-more").click()
    readout.locator(".qig-copy").click()
    canvas.page.wait_for_timeout(200)
    assert readout.locator(".qig-note").text_content() == "Copied"
    assert json.loads(canvas.run("() => navigator.clipboard.readText()")) == content
    readout.locator(".qig-release").click()
    canvas.page.wait_for_timeout(400)
    # This node has never run on the server.
    assert readout.locator(".qig-note").text_content() == "Nothing is held"
    with canvas.page.context.expect_page() as opened:
        readout.locator(".qig-help").click()
    opened.value.wait_for_load_state()
    assert "# Qwen-Image 2.1 Graph Cache" in opened.value.content()
    opened.value.close()


def test_a_real_run_is_shown_and_shown_again_after_a_reload(canvas, server):
    """Two patch nodes in one workflow, on the real server, on a CPU."""
    model = canvas.add("TestStandInModel", at=(20, 60))
    positive = canvas.add("TestStandInPrompt", at=(20, 200), seed=1, tokens=9, references=1)
    negative = canvas.add("TestStandInPrompt", at=(20, 360), seed=2, tokens=5, references=1)
    latent = canvas.add("TestEmptyLatent", at=(20, 520))
    nodes = []
    for index, mode in enumerate(["buffers", "off"]):
        cache = canvas.add("QwenImage21GraphCache", at=(300, 60 + 330 * index), mode=mode)
        # ComfyUI does not run again what it has run: each renderer has seeds of its own.
        seed = 2 * len(canvas.renderer) + index
        sampler = canvas.add("KSampler", at=(660, 60 + 330 * index), steps=6, seed=seed)
        save = canvas.add("SaveLatent", at=(990, 60 + 330 * index))
        canvas.connect(model, 0, cache, "model")
        canvas.connect(cache, 0, sampler, "model")
        canvas.connect(positive, 0, sampler, "positive")
        canvas.connect(negative, 0, sampler, "negative")
        canvas.connect(latent, 0, sampler, "latent_image")
        canvas.connect(sampler, 0, save, "samples")
        nodes.append(cache)
    canvas.run("() => app.queuePrompt(0, 1)")
    canvas.page.wait_for_function(
        """() => app.graph.nodes.filter((node) => node.qigReadout?.state.report
            && !node.qigReadout.state.live).length === 2""",
        timeout=60000,
    )
    canvas.page.wait_for_timeout(500)
    canvas.picture("real_run")
    canvas.open()
    canvas.page.wait_for_timeout(800)
    badges = canvas.page.locator(".qig-badge")
    assert sorted(badges.all_text_contents()) == ["Buffers", "Off"]


def test_a_real_run_that_is_cancelled(canvas, server):
    model = canvas.add("TestStandInModel", at=(20, 60))
    text = canvas.add("TestStandInPrompt", at=(20, 200), seed=1, tokens=9, references=0)
    latent = canvas.add("TestEmptyLatent", at=(20, 400))
    cache = canvas.add("QwenImage21GraphCache", at=(300, 60))
    seed = 100 + len(canvas.renderer)
    sampler = canvas.add("KSampler", at=(660, 60), steps=9000, seed=seed, cfg=1)
    save = canvas.add("SaveLatent", at=(990, 60))
    canvas.connect(model, 0, cache, "model")
    canvas.connect(cache, 0, sampler, "model")
    for name in ("positive", "negative"):
        canvas.connect(text, 0, sampler, name)
    canvas.connect(latent, 0, sampler, "latent_image")
    canvas.connect(sampler, 0, save, "samples")
    canvas.run("() => app.queuePrompt(0, 1)")
    badge, line = (canvas.readout().locator(f".qig-{part}") for part in ("badge", "line"))
    canvas.page.wait_for_function(
        "() => document.querySelector('.qig-line').textContent.includes('step ')", timeout=60000
    )
    assert "/9000" in line.text_content() and badge.text_content() == "Buffers"
    canvas.picture("real_run_live")
    server.post("/interrupt", {})
    canvas.page.wait_for_function(
        "() => document.querySelector('.qig-badge').textContent === 'Cancelled'", timeout=60000
    )
    canvas.picture("real_run_cancelled")


@pytest.mark.parametrize("scale", [0.6, 1.6])
def test_it_can_be_read_in_the_light_and_at_any_zoom(canvas, server, scale):
    canvas.run("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'light')")
    canvas.page.wait_for_timeout(600)
    node = canvas.add("QwenImage21GraphCache")
    canvas.run(
        "(scale) => { app.canvas.ds.scale = scale; app.canvas.setDirty(true, true); }", scale
    )
    canvas.tell(node, report=STATES["buffers"][0])
    canvas.readout().locator(".qig-more").dispatch_event("click")
    canvas.page.wait_for_timeout(500)
    canvas.picture(f"light_{scale}")
    contrast = canvas.run(
        """() => {
            const parse = (color) => color.match(/[\\d.]+/g).map(Number);
            const light = ([r, g, b]) => {
                const [x, y, z] = [r, g, b].map((value) => {
                    const part = value / 255;
                    return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * x + 0.7152 * y + 0.0722 * z;
            };
            const ratio = (one, other) => {
                const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05);
            };
            const style = (name) => getComputedStyle(document.querySelector(name));
            return [
                ratio(parse(style('.qig-badge').color), parse(style('.qig-badge').backgroundColor)),
                ratio(parse(style('.qig-more').color), parse(style('.qig-more').backgroundColor)),
            ];
        }"""
    )
    assert min(contrast) >= 4.5, contrast
    browsers.inside(canvas, canvas.readout())
    canvas.run("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")


def test_it_speaks_chinese(server, chromium, canvas):
    theirs = browsers.Canvas(chromium, server, canvas.renderer, locale="zh")
    theirs.clear()
    node = theirs.add("QwenImage21GraphCache")
    theirs.tell(node, report=report())
    assert theirs.readout().locator(".qig-badge").text_content() == "图重放"
    theirs.picture("chinese")
    theirs.page.context.close()
    server.post("/settings/Comfy.Locale", "en")
