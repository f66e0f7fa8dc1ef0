"""The ceiling of a decode step: its matrix products and its attention, and nothing else.

Whatever computes a step computes these. They run as one CUDA graph, until the chip is as warm and
as short of power as in a long run: in short bursts the same calls are faster, and no step could be.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import QwenImage21Transformer2DModel

from .fast.attention import best_attention
from .layout import SequenceLayout

_TIMED = 10
"""Replays that are timed together."""


def ceiling_ms(
    model: QwenImage21Transformer2DModel,
    layout: SequenceLayout,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float = 2.0,
) -> float:
    """Time of a step's products and attention under sustained load, in ms.

    Parameters
    ----------
    model
        Only its sizes count.
    layout, batch
        Of the step.
    dtype, device
        What to run in, and where.
    seconds
        How long to run before the time is taken.
    """
    step = _step(model, layout, batch, dtype, device)
    with torch.inference_mode():
        step()
        if device.type != "cuda":
            return _timed(step, lambda: None, seconds)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return _timed(graph.replay, lambda: torch.cuda.synchronize(device), seconds)


def _step(
    model: QwenImage21Transformer2DModel,
    layout: SequenceLayout,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    block = model.transformer_blocks[0]
    heads, head_dim = model.config.num_attention_heads, model.config.attention_head_dim
    width, wide = heads * head_dim, block.img_mlp.proj.out_features
    target, joined = layout.target_tokens, layout.prefix_tokens + layout.target_tokens

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    # Zeros would need less power. One layer's weights, 0.4 GB in the 7 B model, are more than any
    # cache holds, so they are read from memory in every layer.
    x, middle = drawn(batch, target, width), drawn(batch, target, wide)
    query = drawn(batch, target, heads, head_dim)
    key, value = (drawn(batch, joined, heads, head_dim) for _ in range(2))
    products = [
        (x, drawn(3 * width, width)),
        (x, drawn(width, width)),
        (x, drawn(2 * wide, width)),
        (middle, drawn(width, wide)),
    ]
    attention = best_attention(device, dtype, heads, head_dim).function

    def step() -> None:
        for _ in model.transformer_blocks:
            for given, weight in products:
                F.linear(given, weight)
            attention(query, key, value)

    return step


def _timed(run: Callable[[], None], wait: Callable[[], None], seconds: float) -> float:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        run()
        wait()
    began = time.perf_counter()
    for _ in range(_TIMED):
        run()
    wait()
    return (time.perf_counter() - began) / _TIMED * 1e3
