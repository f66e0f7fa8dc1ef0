"""The patch node: MODEL in, MODEL out, any sampler behind it."""

from __future__ import annotations

from comfy_api.latest import io

from ..graph_cache import Fallback
from ..graph_cache.models.comfyui import Options, patch
from .inputs import advanced, mode, schema
from .status import left_alone, publisher


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
        node_id = cls.hidden.unique_id
        options = Options(mode, verify, keep_between_runs, max_vram_gb, min_steps)
        patched, found = patch(model, options, publisher(node_id))
        if isinstance(found, Fallback):
            left_alone(node_id, found)
        return io.NodeOutput(patched)
