"""Checks on a torch module that hold for any model: what was hooked, wrapped, moved or compiled.

They look at classes by name where the class lives in a library that need not be installed (peft,
accelerate, diffusers), and they only look: nothing here changes a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .reasons import Fallback

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)

# Names under which diffusers registers its hooks, by what they do to a block.
_OFFLOAD_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
_OFFLOAD_HOOKS += ("layerwise_casting", "peft_autocast_disable")
_CACHE_HOOKS = ("faster_cache", "fbc_", "mag_cache", "pyramid_attention", "sea_cache")
_CACHE_HOOKS += ("taylorseer", "text_kv_cache", "layer_skip", "smoothed_energy")


def wrapper_fallback(model: nn.Module) -> Fallback | None:
    """Why a wrapper around a model cannot be looked through, if it is one."""
    names = [cls.__name__ for cls in type(model).__mro__]
    if "OptimizedModule" in names:
        return Fallback("compiled", "the whole model")
    if "FullyShardedDataParallel" in names:
        return Fallback("fully_sharded", "FullyShardedDataParallel")
    return None


def module_fallbacks(model: nn.Module, own_hook: str) -> Iterator[Fallback]:
    """What was done to a model's modules that a replay would miss.

    Parameters
    ----------
    model
        The model that the cache is attached to. Forward hooks on it (not below it) keep working
        and are not reported, since they run around our step too.
    own_hook
        Name of the diffusers hook that is ours.

    Yields
    ------
    Fallback
        One for every finding; the first of each kind is enough for the caller.
    """
    for name, module in model.named_modules():
        where = name or type(model).__name__
        yield from _class_fallbacks(module, where)
        yield from _hook_fallbacks(module, where, own_hook, is_root=not name)


def _class_fallbacks(module: nn.Module, where: str) -> Iterator[Fallback]:
    names = [cls.__name__ for cls in type(module).__mro__]
    if "FullyShardedDataParallel" in names or "FSDPModule" in names:
        yield Fallback("fully_sharded", where)
    if "OptimizedModule" in names or module._compiled_call_impl is not None:
        yield Fallback("compiled", where)
    if hasattr(module.forward, "_torchdynamo_orig_callable"):
        yield Fallback("compiled", where)
    if is_tuner(module):
        stop = lora_fallback(module)
        if stop is not None:
            yield stop


def is_tuner(module: nn.Module) -> bool:
    """Whether a module is one of peft's adapter layers."""
    return "BaseTunerLayer" in [cls.__name__ for cls in type(module).__mro__]


def lora_fallback(layer: nn.Module) -> Fallback | None:
    """Whether one of peft's layers adds adapters to its result that are not in the weights."""
    if layer.disable_adapters:
        return None
    loose = [
        adapter
        for adapter in layer.active_adapters
        if adapter not in layer.merged_adapters
        # An active adapter need not have weights in this very layer.
        and any(adapter in getattr(layer, names) for names in layer.adapter_layer_names)
    ]
    return Fallback("lora_dynamic", ", ".join(loose)) if loose else None


def _hook_fallbacks(
    module: nn.Module, where: str, own_hook: str, is_root: bool
) -> Iterator[Fallback]:
    # accelerate replaces `forward` and leaves its hook here.
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield Fallback("offload_hooks", f"{type(hook).__name__} on {where}")
    registry = getattr(module, "_diffusers_hook", None)
    registered = [key for key in registry.hooks if key != own_hook] if registry is not None else []
    for key in registered:
        if key.startswith(_OFFLOAD_HOOKS):
            yield Fallback("offload_hooks", f"{key} on {where}")
        elif key.startswith(_CACHE_HOOKS):
            yield Fallback("cache_hooks", f"{key} on {where}")
        else:
            yield Fallback("module_hooks", f"{key} on {where}")
    if is_root:
        return
    if module._forward_hooks or module._forward_pre_hooks:
        yield Fallback("module_hooks", f"forward hook on {where}")
    if "forward" in vars(module) and hook is None and not registered:
        # diffusers leaves the original method here when it removes its last hook.
        patched = vars(module)["forward"]
        if getattr(patched, "__func__", None) is not type(module).forward:
            yield Fallback("module_hooks", f"patched forward on {where}")


def tensor_fallbacks(
    tensors: Iterable[torch.Tensor], device: torch.device | None
) -> Iterator[Fallback]:
    """What about a model's weights stands against capturing them.

    Types are allowed by name, not excluded: an unknown tensor subclass may copy from the host or
    synchronise when it is used, and a capture that fails there can end the process.

    Parameters
    ----------
    tensors
        Parameters and buffers.
    device
        Where the call's inputs are; None if there is no call yet.
    """
    for tensor in tensors:
        if "DTensor" in [cls.__name__ for cls in type(tensor).__mro__]:
            yield Fallback("tensor_parallel")
        elif device is not None and tensor.device != device:
            yield Fallback("device_mismatch", f"weights on {tensor.device}, inputs on {device}")
        elif type(tensor) not in _PLAIN_TYPES:
            yield Fallback("weight_type", type(tensor).__name__)
        elif tensor.is_floating_point() and tensor.dtype not in _PLAIN_DTYPES:
            yield Fallback("weight_type", str(tensor.dtype).removeprefix("torch."))


def call_fallback(device: torch.device) -> Fallback | None:
    """What about the moment of a call stands against our path; cheap enough for every step."""
    if torch.is_grad_enabled():
        return Fallback("training")
    if torch.is_autocast_enabled(device.type):
        return Fallback("autocast")
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return Fallback("nested_capture")
        if device.index is not None and device.index != torch.cuda.current_device():
            current = torch.cuda.current_device()
            return Fallback("device_mismatch", f"inputs on {device}, current device cuda:{current}")
    return None
