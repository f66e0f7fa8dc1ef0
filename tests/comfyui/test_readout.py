"""The readout on one node, in a real browser: every state, while a run goes on, its toggle."""

import browser as browsers
import pytest
from browser_fixtures import MARKS, _empty, canvas, chromium, server  # noqa: F401
from browser_reports import STATES, report

pytestmark = MARKS


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
    browsers.inside(canvas, readout)


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
        pytest.skip("in Nodes 2.0 the content sets the size of a node; this is about the canvas")
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
