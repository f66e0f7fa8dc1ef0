"""The choice of an attention kernel for a fast step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

_HOPPER = 9
"""From this major compute capability on, cuDNN's attention is the faster one."""


class Attention(NamedTuple):
    """A kernel's name for reports, and the kernel.

    It takes query, key and value, ``(batch, tokens, heads, head_dim)``; key and value have the
    tokens of [prefix | target]. It returns the query's shape.
    """

    name: str
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def best_attention(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> Attention:
    """The fastest full attention for a device.

    On an H200 cuDNN computes 670 TFLOP/s where FlashAttention-2 computes 357
    (docs/performance.md); on Ampere and Ada torch's own choice is FlashAttention-2. No switch of
    torch is touched: they belong to the whole process, and a user may have set them.
    """
    if device.type == "cuda" and torch.version.hip is None:
        hopper = torch.cuda.get_device_capability(device)[0] >= _HOPPER
        if hopper and torch.backends.cuda.cudnn_sdp_enabled():
            query = torch.zeros(1, 128, heads, head_dim, dtype=dtype, device=device)
            try:
                _cudnn(query, query, query)
            except (RuntimeError, AttributeError, TypeError):
                # Not for this dtype or head size, or torch has renamed it.
                pass
            else:
                return Attention("cudnn", _cudnn)
    return Attention("torch's choice", _torch)


def _torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    return out.transpose(1, 2)


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        None,
        compute_log_sumexp=False,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
    )
    return out[0].transpose(1, 2)
