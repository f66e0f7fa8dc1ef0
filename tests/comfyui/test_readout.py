"""The readout on the nodes, in a real browser: both renderers, every state."""

import json

import browser as browsers
import comfy_env
import pytest

pytestmark = [
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
    assert not [error for error in canvas.errors if "qwen" in error or "qig" in error]


def report(**changes):
    """A report as a machine with a GPU sends it."""
    steps = changes.pop("steps", 25)
    made = {
        "schema": 1,
        "run": 3,
        "adapter": "comfyui",
        "mode": "auto",
        "path": "graph",
        "profile": "exact",
        "device": "NVIDIA GeForce RTX 4090",
        "dtype": "bfloat16",
        "attention": "attention_pytorch",
        "torch": "2.11.0+cu130",
        "calls": steps,
        "counts": {"prefill": 1, "captured": 1, "replayed": steps - 3, "eager": 1},
        "eager_reasons": {"warm_up": 1},
        "ms_per_call": {},
        "fallbacks": [fallback("warm_up", "The first decode step runs eagerly.", expected=True)],
        "conditionings": [
            {
                "prefix_tokens": 4196,
                "references": 1,
                "target_tokens": 4096,
                "buffer_bytes": 2_230_000_000,
            }
        ],
        "captures": 1,
        "capture_seconds": 0.041,
        "entries": 1,
        "buffer_bytes": 0,
        "graph_bytes": 0,
        "peak_bytes": 2_400_000_000,
        "planned_steps": steps,
        "step_ms": 31.2,
        "native_step_ms": 44.6,
        "seconds_saved": 0.32,
        "weights": "int8, DynamicVRAM, resident",
        "verified": {"body": True, "replay": True},
        "error": None,
    }
    return made | changes


def fallback(code, sentence, hint="Nothing to do.", path="buffers", expected=False):
    return {
        "code": code,
        "calls": 1,
        "path": path,
        "expected": expected,
        "sentence": sentence,
        "hint": hint,
    }


STREAMED = fallback(
    "weights_streamed",
    "The model is not wholly on the GPU, so its weights are brought to it in turn (31 of 40).",
    "A smaller image, a quantised model or fewer loaded models leave it more room.",
)
WRAPPED = fallback(
    "other_wrappers",
    "Another node's wrapper stands between the cache and the model (teacache).",
    "Place the graph cache node last, directly in front of the sampler.",
    "native",
)
PATCHED = fallback(
    "block_patches", "A node patches the model's blocks.", "Remove that node.", "native"
)
EAGER = {"prefill": 1, "captured": 0, "replayed": 0, "eager": 24}


STATES = {
    "replaying": (report(), "Replaying", "good", "23 of 25 replayed · 31 ms"),
    "buffers": (
        report(path="buffers", counts=EAGER, captures=0, fallbacks=[STREAMED]),
        "Buffers",
        "warn",
        "1 prefill, 24 eager · 31 ms",
    ),
    "native": (
        report(path="native", counts=EAGER, captures=0, fallbacks=[WRAPPED, PATCHED]),
        "Native",
        "warn",
        "1 prefill, 24 eager · 31 ms",
    ),
    "off": (
        report(mode="off", path="native", counts=EAGER, captures=0, fallbacks=[]),
        "Off",
        "plain",
        "1 prefill, 24 eager · 31 ms",
    ),
    "cancelled": (
        report(error="InterruptProcessingException: InterruptProcessingException", steps=9),
        "Cancelled",
        "warn",
        "",
    ),
    "failed": (report(error="OutOfMemoryError: no room"), "Failed", "bad", "OutOfMemoryError"),
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_told(canvas, name):
    content, badge, tone, line = STATES[name]
    node = canvas.add("QwenImage21GraphCache", mode=content["mode"])
    readout = canvas.readout()
    assert readout.locator(".qig-badge").text_content() == ("Off" if name == "off" else "Ready")
    canvas.tell(node, report=content)
    assert readout.locator(".qig-badge").text_content() == badge
    assert readout.locator(".qig-badge").get_attribute("data-tone") == tone
    assert line in readout.locator(".qig-line").text_content()
    canvas.picture(f"{name}")
    readout.locator(".qig-more").click()
    canvas.page.wait_for_timeout(300)
    assert readout.locator(".qig-more").get_attribute("aria-expanded") == "true"
    reasons = readout.locator(".qig-why li")
    shown = [reasons.nth(index).get_attribute("data-code") for index in range(reasons.count())]
    assert shown == [one["code"] for one in content["fallbacks"] if one["code"] != "warm_up"]
    canvas.picture(f"{name}_expanded")
    inside(canvas, readout)


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


def test_a_run_is_told_while_it_happens(canvas):
    node = canvas.add("QwenImage21GraphCache")
    live = {"mode": "auto", "steps": 25, "step_ms": 31.4}
    canvas.tell(node, live={**live, "step": 1, "kind": "prefill", "path": "buffers"})
    line = canvas.readout().locator(".qig-line")
    assert line.text_content() == "auto · step 1/25 · 31 ms · prefill"
    canvas.tell(node, live={**live, "step": 12, "kind": "replayed", "path": "graph"})
    assert line.text_content() == "auto · step 12/25 · 31 ms · replayed"
    assert canvas.readout().locator(".qig-badge").text_content() == "Replaying"
    canvas.picture("running")
    canvas.tell(node, report=report())
    assert "23 of 25 replayed" in line.text_content()


def test_one_click_turns_the_node_off_and_on(canvas):
    canvas.add("QwenImage21GraphCache", mode="buffers")
    badge = canvas.readout().locator(".qig-badge")

    def mode():
        return canvas.run("() => app.graph.nodes[0].widgets.find((w) => w.name === 'mode').value")

    badge.click()
    assert (mode(), badge.text_content()) == ("off", "Off")
    badge.click()
    assert (mode(), badge.text_content()) == ("buffers", "Ready")
    # By keyboard too.
    badge.focus()
    canvas.page.keyboard.press("Enter")
    assert mode() == "off"


@pytest.mark.parametrize("name", ["replaying", "cancelled", "off"])
def test_a_click_counts_whatever_the_last_run_was(canvas, name):
    """The badge says what the node will do next, not what it once did."""
    content = STATES[name][0]
    node = canvas.add("QwenImage21GraphCache", mode=content["mode"])
    canvas.tell(node, report=content)
    badge = canvas.readout().locator(".qig-badge")
    before = badge.text_content()
    badge.click()
    assert badge.text_content() == ("Ready" if before == "Off" else "Off")
    badge.click()
    assert badge.text_content() == before


def test_a_mode_that_comes_from_elsewhere_is_not_toggled(canvas):
    node = canvas.add("QwenImage21GraphCache", at=(400, 120))
    canvas.run(
        """(id) => {
            const source = LiteGraph.createNode("PrimitiveNode");
            source.pos = [60, 120];
            app.graph.add(source);
            const node = app.graph.getNodeById(Number(id));
            source.connect(0, node, node.findInputSlot("mode"));
        }""",
        node,
    )
    canvas.page.wait_for_timeout(300)
    badge = canvas.readout().locator(".qig-badge")
    assert badge.is_disabled()
    assert badge.get_attribute("title") == "The mode comes from what is connected to it"


def test_the_status_node_has_no_controls_of_a_cache(canvas):
    canvas.add("QwenImage21GraphStatus")
    readout = canvas.readout()
    assert readout.locator(".qig-badge").is_disabled()
    readout.locator(".qig-more").click()
    assert readout.locator(".qig-release").count() == 0
    assert readout.locator(".qig-help").count() == 1


def test_a_report_of_another_workflow_is_not_shown(canvas):
    node = canvas.add("QwenImage21GraphCache")
    canvas.tell(node, report=report(), workflow="00000000-1111-2222-3333-444444444444")
    assert canvas.readout().locator(".qig-badge").text_content() == "Ready"
    mine = canvas.run("() => app.graph.id")
    canvas.tell(node, report=report(), workflow=mine)
    assert canvas.readout().locator(".qig-badge").text_content() == "Replaying"


def test_a_report_outlives_an_undo(canvas):
    canvas.run("() => app.loadGraphData(app.graph.serialize())")
    node = canvas.add("QwenImage21GraphCache")
    canvas.tell(node, report=report(), workflow=canvas.run("() => app.graph.id"))
    # What an undo does: the same workflow is loaded again.
    canvas.run("() => app.loadGraphData(app.graph.serialize())")
    canvas.page.wait_for_timeout(500)
    assert canvas.readout().locator(".qig-badge").text_content() == "Replaying"


def test_buttons_stay_while_a_run_goes_on(canvas):
    """A button that is replaced under the pointer is not clicked."""
    node = canvas.add("QwenImage21GraphCache")
    canvas.tell(node, report=report())
    readout = canvas.readout()
    readout.locator(".qig-more").click()
    readout.locator(".qig-release").focus()
    live = {"mode": "auto", "steps": 25, "step_ms": 31.4, "kind": "replayed", "path": "graph"}
    for step in (4, 5):
        canvas.tell(node, live={**live, "step": step})
    assert canvas.run("() => document.activeElement.className") == "qig-release"


def test_a_size_that_the_user_chose_is_kept(canvas):
    if canvas.renderer == "vue":
        pytest.skip("Vue nodes size themselves")
    node = canvas.add("QwenImage21GraphCache")
    canvas.tell(node, report=report())
    size = "() => [...app.graph.nodes[0].size]"
    canvas.run("() => app.graph.nodes[0].setSize([420, 600])")
    canvas.page.wait_for_timeout(200)
    before = canvas.run(size)
    more = canvas.readout().locator(".qig-more")
    more.click()
    canvas.page.wait_for_timeout(200)
    assert canvas.run(size)[1] > before[1]
    more.click()
    canvas.page.wait_for_timeout(200)
    assert canvas.run(size) == before


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
    inside(canvas, canvas.readout())
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
