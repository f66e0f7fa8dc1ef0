"""ComfyUI's five official Qwen-Image-2.1 workflows take the patch node before their sampler."""

import importlib.util
import json
from pathlib import Path

import pytest

_PACKAGE = "comfyui_workflow_templates_json"
_SAMPLERS = {"KSampler": "model", "CFGGuider": "model"}


def templates():
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        return []
    root = Path(spec.submodule_search_locations[0])
    return sorted(root.rglob("image_qwen_image_2_1*.json"))


FILES = templates()
pytestmark = pytest.mark.skipif(
    not FILES, reason="needs the package comfyui-workflow-templates-json (make test-comfyui)"
)


def graphs(workflow):
    """The canvas and every subgraph, as (nodes, links by id)."""
    for graph in (workflow, *workflow.get("definitions", {}).get("subgraphs", [])):
        links = {}
        for link in graph["links"]:
            if isinstance(link, dict):
                links[link["id"]] = (link["origin_id"], link["origin_slot"], link["type"])
            else:
                links[link[0]] = (link[1], link[2], link[5])
        yield {node["id"]: node for node in graph["nodes"]}, links


def test_there_are_five():
    assert len(FILES) == 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_patch_node_fits_between_model_and_sampler(file):
    import comfy_env

    _, nodes = comfy_env.load_pack()
    schema = nodes["QwenImage21GraphCache"].define_schema()
    (taken,) = [field.get_io_type() for field in schema.inputs if field.id == "model"]
    (given,) = [field.get_io_type() for field in schema.outputs]
    found = 0
    for canvas, links in graphs(json.loads(file.read_text())):
        for node in canvas.values():
            if node["type"] not in _SAMPLERS:
                continue
            (link,) = [i["link"] for i in node["inputs"] if i["name"] == _SAMPLERS[node["type"]]]
            origin, slot, kind = links[link]
            assert kind == taken == given == "MODEL"
            source = canvas[origin]
            assert source["outputs"][slot]["type"] == "MODEL"
            # ComfyUI's own cache node stands there, with settings that we can honour.
            assert source["type"] == "QwenImage21Cache"
            assert source["widgets_values"][:2] == ["auto", "default"]
            found += 1
    assert found
