"""The drag-in sampler: a KSampler with the cache in it."""

from __future__ import annotations

import comfy.samplers
from comfy_api.latest import io

from ..graph_cache import Fallback
from ..graph_cache.models.comfyui import Options
from .inputs import known, mode, schema
from .running import patched_for
from .status import UI_KEY, as_report, status_of


class QwenImage21GraphSampler(io.ComfyNode):
    """Samples through ComfyUI's own common sampler, over a patched clone of the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as ComfyUI shows it."""
        samplers = comfy.samplers.KSampler
        return schema(
            node_id="QwenImage21GraphSampler",
            display_name="Qwen-Image 2.1 Graph Sampler",
            description="KSampler with the graph cache in it: the same picture, sooner. Its "
            "STATUS tells what was done and why.",
            inputs=[
                io.Model.Input("model", tooltip="A Qwen-Image-2.1 model; others are sampled too."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The random seed used for creating the noise.",
                ),
                io.Int.Input(
                    "steps",
                    default=25,
                    min=1,
                    max=10000,
                    tooltip="The number of steps used in the denoising process.",
                ),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Classifier-free guidance. At 1 the negative prompt is not computed.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=samplers.SAMPLERS,
                    default="euler",
                    tooltip="The algorithm used when sampling.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=samplers.SCHEDULERS,
                    default="simple",
                    tooltip="How noise is gradually removed to form the image.",
                ),
                io.Conditioning.Input(
                    "positive", tooltip="Describes what you want to see in the image."
                ),
                io.Conditioning.Input(
                    "negative", tooltip="Describes what you do not want to see in the image."
                ),
                io.Latent.Input("latent_image", tooltip="The latent image to denoise."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much is denoised; lower values keep more of the latent image.",
                ),
                mode(),
            ],
            outputs=[
                io.Latent.Output(tooltip="The denoised latent."),
                io.String.Output(
                    "STATUS", display_name="STATUS", tooltip="What the cache did and why, as JSON."
                ),
            ],
            hidden=[io.Hidden.unique_id],
            **known(io.Schema, has_intermediate_output=True),
        )

    @classmethod
    def execute(
        cls,
        model: io.Model.Type,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: io.Conditioning.Type,
        negative: io.Conditioning.Type,
        latent_image: io.Latent.Type,
        denoise: float = 1.0,
        mode: str = "auto",
    ) -> io.NodeOutput:
        """Sample."""
        # ComfyUI's module of that name, not this package.
        from nodes import common_ksampler

        patched, runtime = patched_for(cls.hidden.unique_id, model, Options(mode))
        (latent,) = common_ksampler(
            patched,
            seed,
            steps,
            cfg,
            sampler_name,
            scheduler,
            positive,
            negative,
            latent_image,
            denoise=denoise,
        )
        if isinstance(runtime, Fallback):
            status = status_of(None, runtime)
        else:
            status = status_of(runtime.report)
        # The node's output, so that a node that ComfyUI skips still shows its last report.
        return io.NodeOutput(latent, status, ui={UI_KEY: (as_report(status),)})
