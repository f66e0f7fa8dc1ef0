"""The patch node: MODEL in, MODEL out, any sampler behind it."""

from __future__ import annotations

from comfy_api.latest import io

from ..graph_cache.models.comfyui import Options
from .inputs import advanced, mode, schema
from .running import patched_for


class QwenImage21GraphCache(io.ComfyNode):
    """Puts the cache in front of whatever samples with the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as ComfyUI shows it."""
        return schema(
            node_id="QwenImage21GraphCache",
            display_name="Qwen-Image 2.1 Graph Cache",
            description="Makes sampling with Qwen-Image-2.1 faster without changing the picture: "
            "keeps the keys and values of prompt and reference images in place, and replays the "
            "sampling step as a CUDA graph. Place it between the model and the sampler. Other "
            "models pass through unchanged.",
            inputs=[
                mode(),
                io.Model.Input("model", tooltip="A Qwen-Image-2.1 model, LoRA and all."),
                *advanced(),
            ],
            outputs=[io.Model.Output(tooltip="The same model, faster to sample with.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        mode: str,
        model: io.Model.Type,
        verify: str = "first",
        keep_between_runs: bool = False,
        max_vram_gb: float = 0.0,
        min_steps: int = 3,
    ) -> io.NodeOutput:
        """Patch a clone of the model."""
        options = Options(mode, verify, keep_between_runs, max_vram_gb, min_steps)
        patched, _ = patched_for(cls.hidden.unique_id, model, options)
        return io.NodeOutput(patched)
