"""The pack in a real ComfyUI server: listed, run through POST /prompt, seen by a browser."""

import queue
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore")

NODES = {
    "QwenImage21GraphCache",
    "QwenImage21GraphSampler",
    "QwenImage21DiffusersLoader",
    "QwenImage21GraphStatus",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from comfy_server import ComfyUIServer

    with ComfyUIServer(tmp_path_factory.mktemp("comfyui")) as running:
        yield running


def workflow(**changes):
    """The same picture four times: plain, patched, custom advanced, our sampler."""
    sampling = {
        "seed": 5,
        "steps": 6,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "latent_image": ["latent", 0],
        "denoise": 1.0,
    }
    cache = {"mode": "buffers", "model": ["model", 0], "verify": "always"}
    cache |= {"keep_between_runs": False, "max_vram_gb": 0.0, "min_steps": 3}
    nodes = {
        "model": ("TestStandInModel", {"kind": "standin"}),
        "positive": ("TestStandInPrompt", {"seed": 1, "tokens": 9, "references": 1}),
        "negative": ("TestStandInPrompt", {"seed": 2, "tokens": 5, "references": 1}),
        "latent": ("TestEmptyLatent", {"height": 6, "width": 4}),
        "plain": ("KSampler", {"model": ["model", 0], **sampling}),
        "cache": ("QwenImage21GraphCache", cache),
        "patched": ("KSampler", {"model": ["cache", 0], **sampling}),
        "guider": (
            "CFGGuider",
            {
                "model": ["cache", 0],
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "cfg": 2.0,
            },
        ),
        "noise": ("RandomNoise", {"noise_seed": 5}),
        "select": ("KSamplerSelect", {"sampler_name": "euler"}),
        "sigmas": (
            "BasicScheduler",
            {"model": ["model", 0], "scheduler": "simple", "steps": 6, "denoise": 1.0},
        ),
        "advanced": (
            "SamplerCustomAdvanced",
            {
                "noise": ["noise", 0],
                "guider": ["guider", 0],
                "sampler": ["select", 0],
                "sigmas": ["sigmas", 0],
                "latent_image": ["latent", 0],
            },
        ),
        "sampler": ("QwenImage21GraphSampler", {"model": ["model", 0], "mode": "auto", **sampling}),
        "status": ("QwenImage21GraphStatus", {"status": ["sampler", 1]}),
        "alone": ("QwenImage21GraphStatus", {"after": ["patched", 0]}),
    }
    for name in ("plain", "patched", "advanced", "sampler"):
        nodes[f"save {name}"] = (
            "SaveLatent",
            {"samples": [name, 0], "filename_prefix": name},
        )
    for name, inputs in changes.items():
        nodes[name][1].update(inputs)
    return {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}


def saved(server, name):
    """The newest latent that was saved under a name."""
    files = sorted((server.base / "output").glob(f"{name}_*.latent"))
    return load_file(files[-1])["latent_tensor"]


def test_the_nodes_are_listed_with_help_on_every_input(server):
    info = server.get("/object_info")
    assert set(info) >= NODES
    for name in NODES:
        assert info[name]["category"] == "model/qwen image 2.1"
        assert info[name]["description"]
        for inputs in (info[name]["input"].get(kind, {}) for kind in ("required", "optional")):
            for key, (_, options) in inputs.items():
                assert options.get("tooltip"), (name, key)
    assert "is not callable" not in server.log.read_text()
    assert "IMPORT FAILED" not in server.log.read_text().split("fixture_pack")[0][-500:]


def test_the_sampler_begins_like_comfyuis_own(server):
    info = server.get("/object_info")
    ours = info["QwenImage21GraphSampler"]["input"]["required"]
    theirs = info["KSampler"]["input"]["required"]
    assert list(ours)[: len(theirs)] == list(theirs)
    defaults = {name: spec[1].get("default") for name, spec in ours.items()}
    assert (defaults["steps"], defaults["cfg"]) == (25, 1.0)
    assert (defaults["sampler_name"], defaults["scheduler"]) == ("euler", "simple")
    assert next(iter(info["QwenImage21GraphCache"]["input"]["required"])) == "mode"


def test_a_workflow_makes_the_same_picture_on_every_way(server):
    events = server.events("viewer")
    entry = server.run(workflow(), "viewer")
    assert entry["status"]["status_str"] == "success", entry["status"]
    plain = saved(server, "plain")
    for name in ("patched", "advanced", "sampler"):
        assert torch.equal(saved(server, name), plain), name
    (text,) = entry["outputs"]["status"]["text"]
    assert "path buffers" in text and "no_cuda" in text
    (text,) = entry["outputs"]["alone"]["text"]
    assert "2 prefill, 10 eager" in text
    reports, texts, live = read(events)
    assert {report["node"] for report in reports} == {"cache", "sampler"}
    assert {report["workflow"] for report in reports} == {"the workflow of the tests"}
    assert all(report["report"]["counts"]["prefill"] == 2 for report in reports)
    assert any(b"buffers: 0/12 calls as a graph" in text for text in texts)
    ended = [event["live"] for event in live if event["live"]["step"] == 6]
    assert len(ended) == 3 and {step["steps"] for step in ended} == {6}
    assert {step["mode"] for step in ended} == {"buffers", "auto"}


def read(events):
    """Our reports and the progress texts among a browser's messages, up to the run's end."""
    reports, texts, live = [], [], []
    while True:
        try:
            event = events.get(timeout=20)
        except queue.Empty:
            raise AssertionError("the run's end was not announced") from None
        if isinstance(event, bytes):
            texts.append(event)
        elif event["type"] == "qwen_image_graph.status":
            # Where a run is, or its report.
            (reports if "report" in event["data"] else live).append(event["data"])
        elif event["type"] == "execution_success":
            return reports, texts, live


def test_no_progress_texts_beside_a_readout(server):
    """Both would say the same on one node."""
    assert server.get("/qwen_image_graph/status?readout=1")["nodes"]
    events = server.events("readout")
    server.run(workflow(plain={"seed": 6}, cache={"min_steps": 4}), "readout")
    reports, texts, _ = read(events)
    assert reports and not texts


def test_another_model_passes_through_and_the_node_says_so(server):
    events = server.events("other")
    entry = server.run(workflow(model={"kind": "another"}), "other")
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert torch.equal(saved(server, "patched"), saved(server, "plain"))
    reports, *_ = read(events)
    codes = {found["code"] for report in reports for found in report["report"]["fallbacks"]}
    assert codes == {"not_qwen21"}
    (text,) = entry["outputs"]["status"]["text"]
    assert "not Qwen-Image-2.1" in text


def test_a_run_that_fails_is_reported_too(server):
    events = server.events("failing")
    changed = workflow(positive={"width": 8})
    changed = {
        name: node
        for name, node in changed.items()
        if name in {"model", "positive", "negative", "latent", "cache", "patched", "save patched"}
    }
    entry = server.run(changed, "failing")
    assert entry["status"]["status_str"] == "error"
    found = []
    while not found:
        event = events.get(timeout=20)
        if not isinstance(event, bytes) and "report" in event.get("data", {}):
            found.append(event["data"]["report"])
    assert "RuntimeError" in found[0]["error"]


def test_bad_values_are_refused_by_name(server):
    """By ComfyUI, or by the node where ComfyUI does not look."""
    wrong = workflow(cache={"mode": "fastest"})
    wrong = {name: wrong[name] for name in used("patched", wrong) | {"save patched"}}
    wrong["save patched"]["inputs"]["samples"] = ["patched", 0]
    try:
        entry = server.run(wrong)
    except RuntimeError as refused:
        assert "fastest" in str(refused)
    else:
        assert entry["status"]["status_str"] == "error"
        (found,) = [text for kind, text in entry["status"]["messages"] if kind == "execution_error"]
        message = "mode must be one of auto, buffers, off, not 'fastest'"
        assert (found["node_id"], found["exception_message"].strip()) == ("cache", message)


def used(name, nodes):
    """A node and all that it needs."""
    links = [value[0] for value in nodes[name]["inputs"].values() if isinstance(value, list)]
    return {name}.union(*(used(link, nodes) for link in links))


def test_what_is_held_can_be_seen_and_given_back(server):
    server.run(workflow(cache={"keep_between_runs": True}))
    nodes = {one["node"]: one for one in server.get("/qwen_image_graph/status")["nodes"]}
    assert set(nodes) >= {"cache", "sampler"}
    assert nodes["cache"]["held_bytes"] > 0 and nodes["cache"]["entries"] == 2
    assert nodes["cache"]["report"]["counts"]["prefill"] == 2
    assert server.post("/qwen_image_graph/release", {"node": "cache"}) == {"released": ["cache"]}
    nodes = {one["node"]: one for one in server.get("/qwen_image_graph/status")["nodes"]}
    assert nodes["cache"]["held_bytes"] == nodes["cache"]["entries"] == 0
    assert "cache" in server.post("/qwen_image_graph/release", {})["released"]


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        ({"node": "nowhere"}, 404, "node nowhere has no cache"),
        ({"node": 7}, 400, "'node' must be a node's id as a string"),
        ({"nodes": "7"}, 400, "nothing but 'node'"),
        ([1], 400, "must be an object"),
        ({"node": "x" * 2000}, 413, "more than 1024 bytes"),
    ],
)
def test_the_release_route_checks_what_it_gets(server, content, code, why):
    with pytest.raises(RuntimeError, match=why) as refused:
        server.post("/qwen_image_graph/release", content)
    assert str(refused.value).startswith(f"{code} ")


def test_the_release_route_takes_no_other_origin(server):
    request = urllib.request.Request(
        server.url + "/qwen_image_graph/release",
        b"{}",
        {"Origin": "http://elsewhere.example", "Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == 403


def test_freeing_the_memory_leaves_the_next_run_right(server):
    kept = {"keep_between_runs": True}
    server.run(workflow(cache=kept))
    server.post("/free", {"unload_models": True, "free_memory": True})
    entry = server.run(workflow(cache=kept, latent={"height": 4, "width": 4}))
    assert entry["status"]["status_str"] == "success"
    assert torch.equal(saved(server, "patched"), saved(server, "plain"))


def test_the_pack_left_no_error_in_the_log(server):
    text = server.log.read_text()
    assert "IMPORT FAILED): " + str(server.base / "custom_nodes") not in text
    assert "the model is left alone" not in text
    assert "could not be reported" not in text
