"""A small model in ComfyUI's real ModelPatcher, sampled by ComfyUI's real samplers."""

from __future__ import annotations

import comfy.model_patcher
import torch
from helpers import FakeCapturer

import nodes
from graph_cache.models.comfyui import Options, Runtime, patch
from graph_cache.report import RunReport

CONTEXT = 16
"""Width of the prompt embeddings."""


def _native_model(dtype: torch.dtype) -> comfy.model_patcher.ModelPatcher:
    import comfy.ops
    import comfy.sd
    from comfy.ldm.qwen_image21.model import QwenImage21Transformer2DModel

    with torch.device("meta"):
        model = QwenImage21Transformer2DModel(
            num_layers=3,
            num_attention_heads=2,
            context_in_dim=CONTEXT,
            mlp_ratio=2,
            dtype=dtype,
            operations=comfy.ops.manual_cast,
        )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (0.05 * torch.randn(value.shape, generator=generator)).to(dtype)
        for name, value in model.state_dict().items()
    }
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": dtype})


def _standin(dtype: torch.dtype, **options) -> comfy.model_patcher.ModelPatcher:
    import comfy.model_management
    from standin import standin_model

    if options.pop("full", False):
        from standin_full import FullModel

        options["model_class"] = FullModel
    model = standin_model(dtype, **options)
    device = comfy.model_management.get_torch_device()
    return comfy.model_patcher.ModelPatcher(model, device, torch.device("cpu"))


class Workbench:
    """One model, and whatever is done with it.

    Parameters
    ----------
    kind
        "standin" or "native".
    dtype
        Of the weights.
    options
        For the stand-in.
    """

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, **options) -> None:
        self.kind = kind
        self.patcher = _native_model(dtype) if kind == "native" else _standin(dtype, **options)
        self.reports: list[RunReport] = []

    @property
    def model(self):
        """The transformer."""
        return self.patcher.model.diffusion_model

    @property
    def report(self) -> RunReport:
        """Of the last run."""
        return self.reports[-1]

    def patch(
        self, patcher=None, capturer: FakeCapturer | None = None, **options
    ) -> tuple[comfy.model_patcher.ModelPatcher, Runtime]:
        """A patched clone; every step compared, unless something else is asked for."""
        patched, runtime = patch(
            patcher or self.patcher,
            Options(**{"verify": "always", **options}),
            self.reports.append,
        )
        runtime.capturer = capturer
        return patched, runtime

    def sample(self, patcher=None, cfg=1.0, steps=5, sampler="euler", scheduler="simple", **job):
        """Sample; the latents."""
        job = job or {"positive": prompt(1)}
        latent = {"samples": torch.zeros(job.get("batch", 1), 64, *job.get("size", (6, 4)))}
        if job.get("mask"):
            latent["samples"] = latent["samples"] + 0.1
            latent["noise_mask"] = torch.zeros(1, 1, *job.get("size", (6, 4)))
            latent["noise_mask"][..., 2:, :] = 1
        with torch.inference_mode():
            out = nodes.common_ksampler(
                patcher or self.patcher,
                job.get("seed", 1),
                steps,
                cfg,
                sampler,
                scheduler,
                job.get("positive", prompt(1)),
                job.get("negative", prompt(2, tokens=5)),
                latent,
            )
        return out[0]["samples"]


def prompt(seed: int, tokens: int = 9, references: int = 0) -> list:
    """A conditioning, as ComfyUI's text encoding node makes it."""
    generator = torch.Generator().manual_seed(seed)
    content = {"pooled_output": None}
    if references:
        shapes = [(4, 4), (2, 6), (4, 2)]
        content["reference_latents"] = [
            torch.randn(1, 64, *shapes[index % 3], generator=generator)
            for index in range(references)
        ]
        content["image_slots"] = [min(tokens, 2 * index + 1) for index in range(references)]
    return [[torch.randn(1, tokens, CONTEXT, generator=generator), content]]
