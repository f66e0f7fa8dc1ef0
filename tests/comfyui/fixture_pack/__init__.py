"""A custom node pack for the tests: the stand-in model and prompts for it, on a real canvas."""

from __future__ import annotations

import sys
from pathlib import Path

# Through any link: the tests' own modules lie beside this folder.
_TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS), str(_TESTS.parent), str(_TESTS.parents[1])]


class StandInModel:
    """MODEL: the stand-in for Qwen-Image-2.1, or a model of another kind."""

    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"kind": (["standin", "another"],)}}

    def make(self, kind):
        import comfy.model_patcher
        import torch
        from standin import QwenImage21Transformer2DModel, standin_model

        model = standin_model()
        if kind == "another":
            # The same mathematics under a name that is not known.
            model.diffusion_model.__class__ = type(
                "AnotherModel", (torch.nn.Module,), dict(QwenImage21Transformer2DModel.__dict__)
            )
        cpu = torch.device("cpu")
        return (comfy.model_patcher.ModelPatcher(model, cpu, cpu),)


class StandInPrompt:
    """CONDITIONING: a prompt embedding by its seed."""

    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 1})
        names = ("seed", "tokens", "references")
        optional = {"width": ("INT", {"default": 16})}
        return {"required": dict.fromkeys(names, integer), "optional": optional}

    def make(self, seed, tokens, references, width=16):
        from workbench import prompt

        made = prompt(seed, tokens, references)
        # A prompt of another text encoder: the model raises.
        made[0][0] = made[0][0][..., :width]
        return (made,)


class EmptyLatent:
    """LATENT of 64 channels."""

    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("LATENT",)

    @classmethod
    def INPUT_TYPES(cls):
        integer = ("INT", {"default": 6})
        return {"required": {"height": integer, "width": integer}}

    def make(self, height, width):
        import torch

        return ({"samples": torch.zeros(1, 64, height, width)},)


def _official(name, outputs, required, optional=None):
    """Stands for a node of a later ComfyUI, so that workflows can be loaded and looked over."""

    def inputs(cls):
        return {"required": required, "optional": optional or {}}

    def make(self, **given):
        raise NotImplementedError(f"{name} is only here to be looked at")

    return type(
        name,
        (),
        {
            "CATEGORY": "tests",
            "FUNCTION": "make",
            "RETURN_TYPES": tuple(outputs.values()),
            "RETURN_NAMES": tuple(outputs),
            "INPUT_TYPES": classmethod(inputs),
            "make": make,
        },
    )


_TEXT = ("STRING", {"multiline": True, "default": ""})
_LATER = {
    "TextEncodeQwenImage21": _official(
        "TextEncodeQwenImage21",
        {"positive": "CONDITIONING", "negative": "CONDITIONING", "latent": "LATENT"},
        {
            "clip": ("CLIP",),
            "prompt": _TEXT,
            "negative_prompt": _TEXT,
            "resolution": ("INT", {"default": 1024, "min": 0, "max": 4096, "step": 32}),
        },
        {"vae": ("VAE",), **{f"images.image_{index}": ("IMAGE",) for index in range(1, 4)}},
    ),
    "ManualSigmas": _official(
        "ManualSigmas", {"SIGMAS": "SIGMAS"}, {"sigmas": ("STRING", {"default": ""})}
    ),
}


def _missing_here():
    """Of those nodes, the ones that this ComfyUI lacks."""
    import nodes

    return {name: cls for name, cls in _LATER.items() if name not in nodes.NODE_CLASS_MAPPINGS}


NODE_CLASS_MAPPINGS = {
    **_missing_here(),
    "TestStandInModel": StandInModel,
    "TestStandInPrompt": StandInPrompt,
    "TestEmptyLatent": EmptyLatent,
}


def _add_event_route():
    """POST /test/event sends a browser whatever a machine with a GPU would send."""
    import sys

    server = getattr(sys.modules.get("server"), "PromptServer", None)
    if server is None:
        return
    from aiohttp import web

    @server.instance.routes.post("/test/event")
    async def send(request):
        event = await request.json()
        server.instance.send_sync(event["type"], event["data"])
        return web.json_response({})


_add_event_route()
