"""Everything that is asked of ComfyUI itself, in one place: ComfyUI changes weekly.

Each function imports what it needs when it is called. What only later versions have is looked
for, and its absence means that ComfyUI does not do the thing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def raise_if_interrupted() -> None:
    """Raise ComfyUI's own exception if the user has cancelled the run."""
    from comfy import model_management

    model_management.throw_exception_if_processing_interrupted()


def headroom_bytes() -> int:
    """Device memory that ComfyUI itself keeps free for a model's activations."""
    from comfy import model_management

    return int(model_management.minimum_inference_memory())


def free_others(nbytes: int, device: torch.device, in_use: tuple) -> None:
    """Have ComfyUI unload models until so many bytes are free.

    Parameters
    ----------
    nbytes, device
        What has to be free, and where.
    in_use
        Patchers whose models the run needs. Those that ComfyUI counts as used stay too: a model
        that is taken away under a running sampler fails.
    """
    from comfy import model_management

    needed = [patcher.model for patcher in in_use]
    keep = [
        loaded
        for loaded in model_management.current_loaded_models
        if loaded.model is not None
        and (loaded.currently_used or any(loaded.model.model is model for model in needed))
    ]
    model_management.free_memory(nbytes, device, keep)


def clean_up_after_error() -> None:
    """Abort what ComfyUI was in the middle of: recording memory, bringing weights."""
    prefetch = sys.modules.get("comfy.model_prefetch")
    clean_up = getattr(prefetch, "cleanup_prefetch_queues", None)
    if clean_up is not None:
        # What ComfyUI itself does at the end of every node.
        clean_up()


def graphs_disabled() -> bool:
    """Whether ComfyUI was started with ``--disable-cuda-graphs``."""
    from comfy.cli_args import args

    return bool(getattr(args, "disable_cuda_graphs", False))


def in_training() -> bool:
    """Whether one of ComfyUI's training nodes is at work."""
    from comfy import model_management

    return bool(getattr(model_management, "in_training", False))


def optimized_attention(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The attention function that a model's own code calls, replaced by another pack or not."""
    from comfy.ldm.modules import attention

    module = sys.modules.get(type(model).__module__)
    return getattr(module, "optimized_attention", attention.optimized_attention)


def memory_recorder_active() -> bool:
    """Whether ComfyUI records this thread's allocations around the call ("Comfy Compiler")."""
    prefetch = sys.modules.get("comfy.model_prefetch")
    recorders = getattr(prefetch, "MALLOC_GRAPHS", {})
    recorder = recorders.get(threading.get_ident())
    return bool(recorder is not None and getattr(recorder, "_comfy_active", False))


def vbar() -> Any:
    """The module behind DynamicVRAM's ranges; asked for only where a model has such ranges."""
    from comfy_aimdo import model_vbar

    return model_vbar


@contextmanager
def weights_of(
    modules: tuple[nn.Module, ...], like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Weights of ComfyUI's modules where and as a tensor is, brought there if they have to be."""
    from comfy import ops

    held = []
    try:
        for module in modules:
            held.append((module, *ops.cast_bias_weight(module, like, offloadable=True)))
        yield tuple(weight for _, weight, _, _ in held)
    finally:
        for module, weight, bias, stream in held:
            ops.uncast_bias_weight(module, weight, bias, stream)


@contextmanager
def prefetched_blocks(
    blocks: list[nn.Module], device: torch.device, dtype: torch.dtype, options: dict
) -> Iterator[Callable[[nn.Module | None], None]]:
    """ComfyUI's queue that brings the next block's weights while one is computed.

    Yields
    ------
    Callable
        To be called with each block before it runs, and with None after the last.
    """
    prefetch = sys.modules.get("comfy.model_prefetch")
    if prefetch is None or not options.get("prefetch_dynamic_vbars", False):
        yield lambda block: None
        return
    queue = prefetch.make_prefetch_queue(list(blocks), device, options)
    # What is left in the queue after an error, ComfyUI clears at the end of the node.
    yield lambda block: prefetch.prefetch_queue_pop(queue, device, block, dtype)
