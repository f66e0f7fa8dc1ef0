"""What about ComfyUI's native model, or one call of it, stands against the cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...eligibility import module_fallbacks
from ...reasons import Fallback
from . import core
from .residency import Residency
from .run_context import some
from .step import modulation_parts

# What the decode step touches. A model without exactly these is not one we know.
_MODEL_CHILDREN = {
    *("time_text_embed", "txt_in", "img_in", "modulation"),
    *("transformer_blocks", "norm_out", "proj_out"),
}
_MODEL_PARTS = ("_forward", "build_sequence", "reset_prefix_cache")
_MODEL_PARTS += ("prefix_cache", "prefix_cache_enabled", "inner_dim", "out_channels")
_FORWARD_ARGUMENTS = {"x", "context", "ref_latents", "image_slots", "transformer_options"}
_BLOCK_ARGUMENTS = ["x", "mod", "pe", "attn_fn", "prefix_len", "transformer_options"]

_PLAIN_DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_LAYOUTS = ("TensorWiseINT8Layout",)
"""Quantised layouts whose steps were bit-equal over the buffers (docs/reliability.md)."""
_LAYOUT_NAMES = {"TensorWiseINT8Layout": "int8"}
_ATTENTION = ("attention_pytorch", "attention_flash", "attention_comfy_kitchen_int8")
"""Attention functions that decide nothing by the memory that is free."""

_CORE_GRAPHS = "enable_graph"
"""What ComfyUI's own code says where it captures a model's blocks (`comfy.model_prefetch`)."""
_FURTHER = ("control", "attention_mask")
"""Arguments of a call beyond the six that are known, each with a reason of its own."""

_CALL_OPTIONS = {
    "context_window": "context_windows",
    "multigpu_thread_device": "multi_gpu",
}
"""Entries of ``transformer_options`` that no replay can honour."""


def is_native_model(model: object) -> bool:
    """Whether a model is ComfyUI's native Qwen-Image-2.1, by its class's name and methods."""
    names = [cls.__name__ for cls in type(model).__mro__]
    return "QwenImage21Transformer2DModel" in names and hasattr(model, "build_sequence")


def model_fallbacks(
    model: nn.Module, residency: Residency, device: torch.device | None
) -> Iterator[Fallback]:
    """What holds until the next prefill; without a device, whatever can be said before a call."""
    structure = list(_structure_fallbacks(model))
    yield from structure
    if structure:
        # The checks below walk over what is not there.
        return
    yield from module_fallbacks(model, own_hook="")
    graphed = any(hasattr(block, "_comfy_graph") for block in model.transformer_blocks)
    if graphed or _core_captures(type(model)):
        yield Fallback("core_graphs")
    if core.graphs_disabled():
        yield Fallback("graphs_disabled")
    yield from weight_fallbacks(model, residency, device)


@functools.cache
def _core_captures(cls: type[nn.Module]) -> bool:
    try:
        return _CORE_GRAPHS in inspect.getsource(cls._forward)
    except (OSError, TypeError):
        return False


def _structure_fallbacks(model: nn.Module) -> Iterator[Fallback]:
    missing = _MODEL_CHILDREN - {name for name, _ in model.named_children()}
    missing |= {name for name in _MODEL_PARTS if not hasattr(model, name)}
    if missing:
        yield Fallback("structure_unknown", f"the model has no {', '.join(sorted(missing))}")
        return
    arguments = inspect.signature(type(model).forward).parameters
    missing = _FORWARD_ARGUMENTS - set(arguments)
    if missing:
        yield Fallback("structure_unknown", f"forward takes no {', '.join(sorted(missing))}")
    blocks = {type(block) for block in model.transformer_blocks}
    if len(blocks) != 1:
        yield Fallback("structure_unknown", f"blocks of {len(blocks)} classes")
        return
    block = blocks.pop()
    if list(inspect.signature(block.forward).parameters)[1:] != _BLOCK_ARGUMENTS:
        yield Fallback("structure_unknown", f"{block.__name__} takes other arguments")
    elif modulation_parts(block) not in (4, 5):
        yield Fallback("structure_unknown", f"{block.__name__} takes another modulation")
    if model.proj_out.weight.shape[0] != model.out_channels:
        # Several heads in one, chosen by the noise level.
        yield Fallback("structure_unknown", "proj_out has more rows than the model has channels")


def weight_fallbacks(
    model: nn.Module, residency: Residency, device: torch.device | None
) -> Iterator[Fallback]:
    """What about the weights speaks against a graph, as they are now."""
    functions = [
        name
        for name, module in model.named_modules()
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None)
    ]
    if functions:
        yield Fallback("weight_functions", some(functions))
    places = {tensor.device for tensor in residency.tensors()}
    if device is not None and places - {device}:
        yield Fallback("weights_streamed", f"weights on {some(sorted(map(str, places)))}")
    for tensor in model.parameters():
        layout = getattr(tensor, "_layout_cls", None)
        if layout is not None:
            name = getattr(layout, "__name__", str(layout))
            if name not in _LAYOUTS:
                yield Fallback("weight_type", name)
        elif type(tensor) not in (torch.Tensor, nn.Parameter):
            yield Fallback("weight_type", type(tensor).__name__)
        elif tensor.is_floating_point() and tensor.dtype not in _PLAIN_DTYPES:
            yield Fallback("weight_type", str(tensor.dtype).removeprefix("torch."))


def describe_weights(model: nn.Module, residency: Residency) -> str:
    """The blocks' weights for people: ``int8, DynamicVRAM``."""
    kinds = set()
    for block in model.transformer_blocks:
        for tensor in block.parameters():
            layout = getattr(tensor, "_layout_cls", None)
            if layout is not None:
                kinds.add(_LAYOUT_NAMES.get(layout, layout))
            elif tensor.ndim > 1:
                kinds.add(str(tensor.dtype).removeprefix("torch."))
    held = ["DynamicVRAM"] if residency.dynamic else []
    return ", ".join([*sorted(map(str, kinds)), *held])


def attention_fallbacks(model: nn.Module, options: Mapping[str, Any]) -> Iterator[Fallback]:
    """What about the choice of attention speaks against a graph."""
    for name in attention_names(model, options):
        if name.startswith("override "):
            yield Fallback("attention_override", name.removeprefix("override "))
        elif name not in _ATTENTION:
            yield Fallback("attention_backend", name.removeprefix("attention_"))


def attention_is_known(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether every attention function that the blocks would use is one we know."""
    return set(attention_names(model, options)) <= set(_ATTENTION)


def attention_names(model: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Names of the attention functions that the blocks would use with these options, sorted.

    An override stands in for all of them. One that ComfyUI's own
    ``set_model_optimized_attention`` has made stands for the function in it; any other for itself.
    """
    override = options.get("optimized_attention_override")
    if override is not None:
        cells = getattr(override, "__closure__", None) or ()
        inside = [getattr(cell.cell_contents, "__name__", "") for cell in cells]
        if "set_model_optimized_attention" in override_name(override) and len(inside) == 1:
            return inside
        return [f"override {override_name(override)}"]
    chosen = {core.optimized_attention(model).__name__}
    for block in model.transformer_blocks:
        own = getattr(getattr(block.attn, "comfy_attention", None), "function", None)
        if own is not None:
            chosen.add(own.__name__)
    return sorted(chosen)


def override_name(override: Any) -> str:
    """A function's qualified name, or its class's."""
    return getattr(override, "__qualname__", type(override).__name__)


def call_fallback(arguments: Mapping[str, Any]) -> Fallback | None:
    """What about one call stands against the cache; cheap enough for every step."""
    options = arguments["transformer_options"]
    if arguments["unknown"]:
        return Fallback("structure_unknown", arguments["unknown"])
    if arguments["inner_wrappers"]:
        return Fallback("other_wrappers", arguments["inner_wrappers"])
    if "uuids" not in options or "cond_or_uncond" not in options:
        return Fallback("structure_unknown", "calls without identities of their conditionings")
    patches = _block_patches(options)
    if patches:
        return Fallback("block_patches", some(patches))
    for name, code in _CALL_OPTIONS.items():
        if options.get(name) is not None:
            return Fallback(code, name)
    if arguments["further"].get("control") is not None:
        return Fallback("controlnet")
    if arguments["further"].get("attention_mask") is not None:
        return Fallback("padded_text")
    unknown = [
        name
        for name, value in arguments["further"].items()
        if value is not None and name not in _FURTHER
    ]
    if unknown:
        return Fallback("structure_unknown", f"the model is called with {some(unknown)}")
    cache = options.get("qwen_image21_cache") or {}
    if cache.get("device") == "off":
        return Fallback("native_cache_off")
    if cache.get("device") == "cpu":
        return Fallback("native_cache_host")
    if cache.get("dtype", "default") != "default":
        return Fallback("kv_quantized", cache["dtype"])
    if core.in_training():
        return Fallback("training")
    return Fallback("memory_recorder") if core.memory_recorder_active() else None


def _block_patches(options: Mapping[str, Any]) -> list[str]:
    found = [f"{name} patch" for name, patches in options.get("patches", {}).items() if patches]
    found += [f"{name} replaced" for name, patches in _replaced(options) if patches]
    return found


def _replaced(options: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return options.get("patches_replace", {}).items()
