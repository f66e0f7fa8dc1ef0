"""The reasons for which a call does not replay a CUDA graph, whichever library runs the model.

A reason has a stable code (for JSON, tests and documentation), the best path that stays open,
a sentence for the user and a hint what to do about it. Nothing else in the project writes
fallback text: checks create a `graph_cache.reasons.Fallback` from a code and a detail.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Path(str, Enum):
    """How one model call was executed."""

    GRAPH = "graph"
    """A captured CUDA graph was replayed."""
    BUFFERS = "buffers"
    """Our decode body ran eagerly over the persistent prefix buffers."""
    NATIVE = "native"
    """The model's own, unpatched path ran."""


@dataclass(frozen=True)
class Reason:
    """One row of the table.

    Attributes
    ----------
    code
        Stable identifier.
    path
        The best path that this reason leaves open.
    sentence, hint
        Text for a user; ``{detail}`` is replaced by what the check found.
    expected
        True where this is the normal course of a run, not something to mend.
    """

    code: str
    path: Path
    sentence: str
    hint: str
    expected: bool = False


ROWS = (
    # --- the normal course of a run -------------------------------------------------------
    Reason(
        "warm_up",
        Path.BUFFERS,
        "The first decode step of a layout runs eagerly; it is the warm-up for the capture.",
        "Nothing to do: the next step is captured.",
        expected=True,
    ),
    Reason(
        "mode_buffers",
        Path.BUFFERS,
        "Mode is 'buffers': no CUDA graphs were asked for.",
        "Set mode to 'auto' to replay CUDA graphs.",
        expected=True,
    ),
    Reason(
        "off",
        Path.NATIVE,
        "Mode is 'off': the model runs its own path.",
        "Set mode to 'auto' to turn the cache on.",
        expected=True,
    ),
    # --- what is being asked for --------------------------------------------------------------
    Reason(
        "not_qwen21",
        Path.NATIVE,
        "This model is not Qwen-Image-2.1 ({detail}).",
        "Attach to a Qwen-Image-2.1 transformer; other models run unchanged.",
    ),
    Reason(
        "structure_unknown",
        Path.NATIVE,
        "This version of the model has a structure that is not known here ({detail}).",
        "Update the graph cache, or report the model library's version.",
    ),
    Reason(
        "not_causal",
        Path.NATIVE,
        "The checkpoint has causal_condition off, so its prefix K/V change at every step.",
        "Use a checkpoint with causal_condition=True.",
    ),
    Reason(
        "no_kv_cache",
        Path.NATIVE,
        "The pipeline runs without its K/V cache.",
        "Call the pipeline with use_kv_cache=True (its default).",
    ),
    Reason(
        "training",
        Path.NATIVE,
        "Gradients are enabled.",
        "Call the model under torch.no_grad() or torch.inference_mode().",
    ),
    Reason(
        "autocast",
        Path.NATIVE,
        "torch.autocast is active; it recasts weights behind a capture.",
        "Load the model in the dtype you want instead of using autocast.",
    ),
    Reason(
        "nested_capture",
        Path.NATIVE,
        "Another CUDA graph capture is in progress on this stream.",
        "Do not capture the pipeline yourself, or set mode to 'off'.",
    ),
    Reason(
        "profile_exact",
        Path.GRAPH,
        "The fast profile cannot run this model ({detail}); the exact profile ran.",
        "Nothing to do, or set profile to 'exact'.",
    ),
    # --- the device ----------------------------------------------------------------------------
    Reason(
        "no_cuda",
        Path.BUFFERS,
        "CUDA graphs need a CUDA device; this run is on {detail}.",
        "Run on an NVIDIA GPU for CUDA graphs; the prefix buffers work everywhere.",
    ),
    Reason(
        "rocm",
        Path.BUFFERS,
        "CUDA graphs are known to corrupt results silently on ROCm; they are not used there.",
        "Nothing to do: the prefix buffers stay on.",
    ),
    Reason(
        "device_mismatch",
        Path.NATIVE,
        "Model and inputs are not together on the current device ({detail}).",
        "Keep the whole transformer on one device, the current one.",
    ),
    Reason(
        "vram",
        Path.NATIVE,
        "Not enough memory for the prefix buffers ({detail}).",
        "Use a smaller image, fewer references or a quantised model.",
    ),
    Reason(
        "budget",
        Path.NATIVE,
        "The cache's own limit is reached ({detail}).",
        "Raise it: max_bytes or max_entries, or max_vram_gb on the node.",
    ),
    # --- what has been done to the model -------------------------------------------------------
    Reason(
        "sequence_parallel",
        Path.NATIVE,
        "Sequence (Ulysses) parallelism splits the tokens over several GPUs.",
        "Run the transformer on one GPU.",
    ),
    Reason(
        "ring_parallel",
        Path.NATIVE,
        "Ring attention passes K/V between several GPUs.",
        "Run the transformer on one GPU.",
    ),
    Reason(
        "tensor_parallel",
        Path.NATIVE,
        "Tensor parallelism runs collectives inside the step.",
        "Run the transformer on one GPU.",
    ),
    Reason(
        "fully_sharded",
        Path.NATIVE,
        "The model is wrapped for fully-sharded data parallelism ({detail}).",
        "Use the unwrapped model on one GPU.",
    ),
    Reason(
        "offload_hooks",
        Path.NATIVE,
        "Offload hooks move the weights between devices ({detail}).",
        "Keep the transformer on the GPU: pipe.to('cuda') instead of offloading it.",
    ),
    Reason(
        "cache_hooks",
        Path.NATIVE,
        "A step-skipping cache is installed in the model ({detail}).",
        "Call disable_cache() on the transformer to use the graph cache instead.",
    ),
    Reason(
        "module_hooks",
        Path.NATIVE,
        "Something else hooks or patches modules that a replay would skip ({detail}).",
        "Remove that hook or patch.",
    ),
    Reason(
        "compiled",
        Path.NATIVE,
        "The model is compiled with torch.compile ({detail}).",
        "Use the uncompiled transformer; compiled code and graph replay do not mix yet.",
    ),
    Reason(
        "lora_dynamic",
        Path.NATIVE,
        "LoRA adapters are active but not fused ({detail}).",
        "Call pipe.fuse_lora() to bake them into the weights.",
    ),
    Reason(
        "weight_type",
        Path.BUFFERS,
        "Weights of type {detail} have not been tested inside a CUDA graph.",
        "Plain and int8 weights replay; these run over the prefix buffers.",
    ),
    Reason(
        "attention_processor",
        Path.NATIVE,
        "An attention processor is installed that is not the model's own ({detail}).",
        "Use the model's default attention processor.",
    ),
    Reason(
        "attention_backend",
        Path.BUFFERS,
        "The attention backend '{detail}' has not been tested inside a CUDA graph.",
        "Use PyTorch's own attention for CUDA graphs; the prefix buffers stay on.",
    ),
    Reason(
        "kv_cache_type",
        Path.NATIVE,
        "The K/V cache object is not the pipeline's own ({detail}).",
        "Pass the pipeline's standard K/V cache.",
    ),
    Reason(
        "kv_quantized",
        Path.NATIVE,
        "The K/V cache stores its entries in another type than the model computes ({detail}).",
        "Use an unquantised K/V cache.",
    ),
    # --- this call -----------------------------------------------------------------------------
    Reason(
        "padded_text",
        Path.NATIVE,
        "The prompts have different lengths, so their text is padded and masked.",
        "Generate prompts of different lengths one by one.",
    ),
    Reason(
        "layout_unsupported",
        Path.NATIVE,
        "The order of text, references and target is not one known here ({detail}).",
        "Put the target image last, as the pipeline does.",
    ),
    Reason(
        "unregistered",
        Path.NATIVE,
        "This conditioning was not registered by a prefill in this run.",
        "Let the first step of a run prefill the K/V cache, as the pipeline does.",
    ),
    Reason(
        "layout_changed",
        Path.NATIVE,
        "The call does not fit the prefill of its conditioning ({detail}).",
        "Start a new run when size, batch, dtype or references change.",
    ),
    Reason(
        "prefix_replaced",
        Path.NATIVE,
        "The K/V cache was given other tensors after its prefill.",
        "Leave the K/V cache as the prefill filled it.",
    ),
    # --- what went wrong -----------------------------------------------------------------------
    Reason(
        "weights_changed",
        Path.BUFFERS,
        "Weights moved in memory since the capture; the graph was dropped.",
        "Nothing to do: the next step is captured anew.",
    ),
    Reason(
        "host_sync",
        Path.BUFFERS,
        "The decode step makes the host wait for the GPU, which no CUDA graph can hold ({detail}).",
        "Something was added to the model; the prefix buffers stay on.",
    ),
    Reason(
        "settings_changed",
        Path.BUFFERS,
        "Settings of torch that choose kernels were changed since the prefill.",
        "Set attention kernels and matmul precision before the first step of a run.",
    ),
    Reason(
        "capture_failed",
        Path.BUFFERS,
        "Capturing the CUDA graph failed: {detail}",
        "The prefix buffers stay on. Please report the message.",
    ),
    Reason(
        "vram_graph",
        Path.BUFFERS,
        "Not enough memory to capture the CUDA graph ({detail}).",
        "The prefix buffers stay on. A smaller image or fewer references leave more room.",
    ),
    Reason(
        "graph_budget",
        Path.BUFFERS,
        "The captured graph does not fit the cache's limit ({detail}).",
        "Raise it: max_bytes, or max_vram_gb on the node.",
    ),
    Reason(
        "parity_graph",
        Path.BUFFERS,
        "The first replay was not bit-equal to the same step run eagerly; graphs are off.",
        "The picture is not affected. Please report GPU, driver and torch version.",
    ),
    Reason(
        "parity",
        Path.NATIVE,
        "Our decode step was not bit-equal to the model's own; the cache is off ({detail}).",
        "The picture is not affected. Please report GPU, torch and model library versions.",
    ),
    Reason(
        "parity_fast",
        Path.NATIVE,
        "The fast profile's step was too far from the model's own ({detail}); it is off.",
        "The picture is not affected; later runs are exact. Please report GPU and versions.",
    ),
    Reason(
        "fast_failed",
        Path.NATIVE,
        "The fast profile's step raised an error, so the model's own path ran: {detail}",
        "The picture is not affected; later runs are exact. Please report the message.",
    ),
    Reason(
        "step_failed",
        Path.NATIVE,
        "Our decode step raised an error, so the model's own path ran: {detail}",
        "Please report the message.",
    ),
)
