"""The rows of the reason table that only ComfyUI's native model can meet."""

from __future__ import annotations

from .reason_table import Path, Reason

ROWS = (
    # --- what is being asked for --------------------------------------------------------------
    Reason(
        "short_run",
        Path.NATIVE,
        "The run is too short for the cache to pay ({detail}).",
        "Lower min_steps on the node to use it all the same.",
        expected=True,
    ),
    Reason(
        "native_cache_off",
        Path.NATIVE,
        "The Qwen Image 2.1 Cache node is set to 'off': the prefix is to be computed at each step.",
        "Set its device to 'auto', or remove that node.",
    ),
    Reason(
        "native_cache_host",
        Path.NATIVE,
        "The Qwen Image 2.1 Cache node is set to keep the prefix in system memory.",
        "Set its device to 'auto' or 'gpu', or remove that node.",
    ),
    Reason(
        "graphs_disabled",
        Path.BUFFERS,
        "ComfyUI was started with --disable-cuda-graphs.",
        "Start ComfyUI without that option.",
    ),
    # --- the weights ---------------------------------------------------------------------------
    Reason(
        "weights_streamed",
        Path.BUFFERS,
        "The model is not wholly on the GPU, so its weights are brought to it in turn ({detail}).",
        "A smaller image, a quantised model or fewer loaded models leave it more room.",
    ),
    Reason(
        "weight_functions",
        Path.BUFFERS,
        "Weights are changed each time they are used, by a LoRA on streamed weights ({detail}).",
        "Once the model fits on the GPU, the LoRA is baked in and graphs are used.",
    ),
    Reason(
        "weight_wrappers",
        Path.NATIVE,
        "A node computes weights anew at each step ({detail}).",
        "Remove that node, or leave the cache off.",
    ),
    Reason(
        "weight_hooks",
        Path.NATIVE,
        "Hooks change weights within the run (scheduled or masked LoRA).",
        "Load the LoRA with a plain LoRA loader.",
    ),
    # --- what other nodes have done ------------------------------------------------------------
    Reason(
        "injections",
        Path.NATIVE,
        "A node injects modules into the model ({detail}).",
        "Remove that node, or leave the cache off.",
    ),
    Reason(
        "object_patches",
        Path.NATIVE,
        "A node replaces parts of the model ({detail}).",
        "Remove that node, or leave the cache off.",
    ),
    Reason(
        "block_patches",
        Path.NATIVE,
        "A node patches the model's blocks ({detail}).",
        "Remove that node, or leave the cache off.",
    ),
    Reason(
        "other_wrappers",
        Path.NATIVE,
        "Another node's wrapper stands between the cache and the model ({detail}).",
        "Place the graph cache node last, directly in front of the sampler.",
    ),
    Reason(
        "attention_override",
        Path.BUFFERS,
        "A node replaces the attention function ({detail}), which was not tested in a CUDA graph.",
        "Nothing to do: that attention is used over the prefix buffers.",
    ),
    Reason(
        "controlnet",
        Path.NATIVE,
        "A ControlNet is attached to the conditioning.",
        "Remove it, or leave the cache off.",
    ),
    Reason(
        "context_windows",
        Path.NATIVE,
        "The image is sampled in context windows ({detail}).",
        "Remove the context windows node.",
    ),
    Reason(
        "multi_gpu",
        Path.NATIVE,
        "The model runs on several GPUs ({detail}).",
        "Use one GPU.",
    ),
    Reason(
        "conditioning_changed",
        Path.NATIVE,
        "A conditioning had another content at its second step than at its first ({detail}).",
        "Remove the node that changes it during sampling.",
    ),
    # --- ComfyUI itself ------------------------------------------------------------------------
    Reason(
        "core_graphs",
        Path.NATIVE,
        "This ComfyUI captures the model's blocks in CUDA graphs itself.",
        "Nothing to do: it is left alone.",
    ),
    Reason(
        "memory_recorder",
        Path.NATIVE,
        "ComfyUI records its memory around the whole model, which a replay would upset.",
        "Start ComfyUI with --disable-comfy-compiler, or report your ComfyUI version.",
    ),
)
