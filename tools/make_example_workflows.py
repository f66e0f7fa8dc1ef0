"""Writes example_workflows/*.json: the canvas format, official nodes and ours.

    python tools/make_example_workflows.py

The workflows are written by hand here rather than saved from a canvas, so that a changed node is
changed once.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "example_workflows"

MODEL = "qwen_image_2.1_int8_convrot.safetensors"
TURBO = "qwen_image_2.1_turbo_int8_convrot.safetensors"
CLIP = "qwen3vl_8b_int8_convrot.safetensors"
VAE = "qwen_image_2.1_vae_bf16.safetensors"
SIGMAS = "1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568, 0"
OUR_PACK = "qwen-image-graph-cache"

# Type: inputs with a socket, widgets, outputs, size.
NODES: dict[str, tuple[dict[str, str], list[str], dict[str, str], tuple[int, int]]] = {
    "UNETLoader": ({}, ["unet_name", "weight_dtype"], {"MODEL": "MODEL"}, (330, 90)),
    "CLIPLoader": ({}, ["clip_name", "type", "device"], {"CLIP": "CLIP"}, (330, 115)),
    "VAELoader": ({}, ["vae_name"], {"VAE": "VAE"}, (330, 65)),
    "LoadImage": ({}, ["image", "upload"], {"IMAGE": "IMAGE", "MASK": "MASK"}, (270, 320)),
    "TextEncodeQwenImage21": (
        {
            "clip": "CLIP",
            "vae": "VAE",
            **{f"images.image_{index}": "IMAGE" for index in (1, 2)},
        },
        ["prompt", "negative_prompt", "resolution"],
        {"positive": "CONDITIONING", "negative": "CONDITIONING", "latent": "LATENT"},
        (400, 300),
    ),
    "EmptyLatentImage": ({}, ["width", "height", "batch_size"], {"LATENT": "LATENT"}, (330, 115)),
    "QwenImage21GraphCache": (
        {"model": "MODEL"},
        ["mode", "verify", "keep_between_runs", "max_vram_gb", "min_steps"],
        {"MODEL": "MODEL"},
        (330, 250),
    ),
    "QwenImage21GraphSampler": (
        {
            "model": "MODEL",
            "positive": "CONDITIONING",
            "negative": "CONDITIONING",
            "latent_image": "LATENT",
        },
        ["seed", "control", "steps", "cfg", "sampler_name", "scheduler", "denoise", "mode"],
        {"LATENT": "LATENT", "STATUS": "STRING"},
        (330, 380),
    ),
    "QwenImage21GraphStatus": (
        {"status": "STRING", "after": "LATENT"},
        [],
        {"text": "STRING"},
        (330, 120),
    ),
    "KSampler": (
        {
            "model": "MODEL",
            "positive": "CONDITIONING",
            "negative": "CONDITIONING",
            "latent_image": "LATENT",
        },
        ["seed", "control", "steps", "cfg", "sampler_name", "scheduler", "denoise"],
        {"LATENT": "LATENT"},
        (330, 290),
    ),
    "RandomNoise": ({}, ["noise_seed", "control"], {"NOISE": "NOISE"}, (330, 90)),
    "KSamplerSelect": ({}, ["sampler_name"], {"SAMPLER": "SAMPLER"}, (330, 65)),
    "ManualSigmas": ({}, ["sigmas"], {"SIGMAS": "SIGMAS"}, (330, 65)),
    "CFGGuider": (
        {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING"},
        ["cfg"],
        {"GUIDER": "GUIDER"},
        (330, 110),
    ),
    "SamplerCustomAdvanced": (
        {
            "noise": "NOISE",
            "guider": "GUIDER",
            "sampler": "SAMPLER",
            "sigmas": "SIGMAS",
            "latent_image": "LATENT",
        },
        [],
        {"output": "LATENT", "denoised_output": "LATENT"},
        (330, 130),
    ),
    "VAEDecode": ({"samples": "LATENT", "vae": "VAE"}, [], {"IMAGE": "IMAGE"}, (220, 60)),
    "SaveImage": ({"images": "IMAGE"}, ["filename_prefix"], {}, (330, 320)),
}


class Workflow:
    """A canvas that is filled node by node."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict] = {}
        self._links: list[list] = []

    def add(
        self,
        name: str,
        kind: str,
        at: tuple[int, int],
        *values: object,
        title: str = "",
        **links: str,
    ) -> None:
        """Add a node; ``links`` names the node, and its output, of each connected input."""
        sockets, widgets, outputs, size = NODES[kind]
        if len(values) != len(widgets):
            raise ValueError(f"{kind} has {len(widgets)} widgets, not {len(values)}")
        ours = kind.startswith("QwenImage21Graph")
        node = {
            "id": len(self._nodes) + 1,
            "type": kind,
            "pos": list(at),
            "size": list(size),
            "flags": {},
            "order": len(self._nodes),
            "mode": 0,
            "inputs": [
                {"name": socket, "type": type_, "link": None} for socket, type_ in sockets.items()
            ],
            "outputs": [
                {"name": socket, "type": type_, "links": []} for socket, type_ in outputs.items()
            ],
            "properties": {
                "Node name for S&R": kind,
                "cnr_id": OUR_PACK if ours else "comfy-core",
            },
            "widgets_values": list(values),
        }
        if title:
            node["title"] = title
        self._nodes[name] = node
        for socket, source in links.items():
            self._connect(source, name, socket.replace("__", "."))

    def _connect(self, source: str, name: str, socket: str) -> None:
        origin, _, output = source.partition(".")
        slots = list(NODES[self._nodes[origin]["type"]][2])
        slot = slots.index(output) if output else 0
        target = list(NODES[self._nodes[name]["type"]][0]).index(socket)
        number = len(self._links) + 1
        given = self._nodes[origin]["outputs"][slot]
        taken = self._nodes[name]["inputs"][target]
        if given["type"] != taken["type"]:
            raise ValueError(f"{source} does not fit {name}.{socket}")
        given["links"].append(number)
        taken["link"] = number
        ids = self._nodes[origin]["id"], self._nodes[name]["id"]
        self._links.append([number, ids[0], slot, ids[1], target, given["type"]])

    def save(self, name: str) -> None:
        """Write the workflow."""
        content = {
            "last_node_id": len(self._nodes),
            "last_link_id": len(self._links),
            "nodes": list(self._nodes.values()),
            "links": self._links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _loaders(workflow: Workflow, model: str = MODEL) -> None:
    workflow.add("model", "UNETLoader", (0, 0), model, "default")
    workflow.add("clip", "CLIPLoader", (0, 140), CLIP, "qwen_image", "default")
    workflow.add("vae", "VAELoader", (0, 305), VAE)


def _decoded(workflow: Workflow, latent: str, at: tuple[int, int], prefix: str) -> None:
    x, y = at
    decode = f"decode {latent}"
    workflow.add(decode, "VAEDecode", (x, y), samples=latent, vae="vae")
    workflow.add(f"save {latent}", "SaveImage", (x, y + 110), prefix, images=decode)


def text_to_image() -> Workflow:
    """The patch node in front of a KSampler."""
    made = Workflow()
    _loaders(made)
    prompt = "a capybara reading by candlelight, oil painting"
    made.add("text", "TextEncodeQwenImage21", (380, 140), prompt, "", 1024, clip="clip")
    made.add("latent", "EmptyLatentImage", (0, 420), 1024, 1024, 1)
    made.add(
        "cache", "QwenImage21GraphCache", (830, 0), "auto", "first", False, 0, 3, model="model"
    )
    made.add(
        "sampler",
        "KSampler",
        (1210, 0),
        *(1, "randomize", 25, 1, "euler", "simple", 1),
        model="cache",
        positive="text.positive",
        negative="text.negative",
        latent_image="latent",
    )
    _decoded(made, "sampler", (1590, 0), "qwen_image_2.1")
    return made


def edit_with_two_references() -> Workflow:
    """The sampler node, with its report shown."""
    made = Workflow()
    _loaders(made)
    made.add("first", "LoadImage", (0, 420), "example.png", "image")
    made.add("second", "LoadImage", (300, 420), "example.png", "image")
    made.add(
        "text",
        "TextEncodeQwenImage21",
        (620, 140),
        *("put the object of <image1> into the scene of <image2>", "", 1024),
        clip="clip",
        vae="vae",
        images__image_1="first",
        images__image_2="second",
    )
    made.add(
        "sampler",
        "QwenImage21GraphSampler",
        (1070, 0),
        *(1, "randomize", 25, 1, "euler", "simple", 1, "auto"),
        model="model",
        positive="text.positive",
        negative="text.negative",
        latent_image="text.latent",
    )
    made.add("status", "QwenImage21GraphStatus", (1070, 450), status="sampler.STATUS")
    _decoded(made, "sampler", (1450, 0), "qwen_image_2.1_edit")
    return made


def turbo() -> Workflow:
    """The patch node in front of a guider: eight steps of the turbo model."""
    made = Workflow()
    _loaders(made, TURBO)
    prompt = "a lighthouse in a storm, photograph"
    made.add("text", "TextEncodeQwenImage21", (380, 140), prompt, "", 1024, clip="clip")
    made.add("latent", "EmptyLatentImage", (0, 420), 1024, 1024, 1)
    made.add(
        "cache", "QwenImage21GraphCache", (830, 0), "auto", "first", False, 0, 3, model="model"
    )
    made.add(
        "guider",
        "CFGGuider",
        (1210, 0),
        1,
        model="cache",
        positive="text.positive",
        negative="text.negative",
    )
    made.add("noise", "RandomNoise", (1210, 160), 1, "randomize")
    made.add("select", "KSamplerSelect", (1210, 300), "euler")
    made.add("sigmas", "ManualSigmas", (1210, 415), SIGMAS)
    made.add(
        "sampler",
        "SamplerCustomAdvanced",
        (1590, 0),
        noise="noise",
        guider="guider",
        sampler="select",
        sigmas="sigmas",
        latent_image="latent",
    )
    _decoded(made, "sampler", (1970, 0), "qwen_image_2.1_turbo")
    return made


def off_against_auto() -> Workflow:
    """The same picture twice: without the cache and with it, both reports side by side."""
    made = Workflow()
    _loaders(made)
    prompt = "a red bicycle in front of a blue door"
    made.add("text", "TextEncodeQwenImage21", (380, 140), prompt, "", 1024, clip="clip")
    made.add("latent", "EmptyLatentImage", (0, 420), 512, 512, 1)
    for index, mode in enumerate(("off", "auto")):
        y = 560 * index
        made.add(
            mode,
            "QwenImage21GraphSampler",
            (830, y),
            *(1, "fixed", 25, 1, "euler", "simple", 1, mode),
            title=f"mode {mode}",
            model="model",
            positive="text.positive",
            negative="text.negative",
            latent_image="latent",
        )
        status = f"{mode}.STATUS"
        made.add(f"status {mode}", "QwenImage21GraphStatus", (1210, y), status=status)
        _decoded(made, mode, (1590, y), f"qwen_image_2.1_{mode}")
    return made


WORKFLOWS = {
    "qwen_image_2.1_text_to_image": text_to_image,
    "qwen_image_2.1_edit_two_references": edit_with_two_references,
    "qwen_image_2.1_turbo": turbo,
    "qwen_image_2.1_off_against_auto": off_against_auto,
}

if __name__ == "__main__":
    for name, make in WORKFLOWS.items():
        make().save(name)
